"""Trial of a network on samples of random numbers; `tensorflow/trial.py` has the same for Keras."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.common.training.hooks import Check
from allstep.common.training.opening import smallest_pass
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import num_samples, variants_of
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.network_state import is_lazy
from allstep.pytorch.kept.pass_state import note_pass_state
from allstep.pytorch.kept.snapshot import Snapshot
from allstep.pytorch.kept.uses import noting_uses
from allstep.pytorch.losses import WithHeads, return_logits

_SMALL, _STRIDE = 64, 32
"""Pixels of the shorter side of the small images of a trial, and what their sides are multiples of."""


def try_network(
    network: nn.Module, dataset: Dataset, sharded: bool, *, of_library: bool = False, in_parts: bool = False
) -> object:
    """Move the network to the default device, and return its outputs for two samples of random numbers.

    The trial covers training as well, where some networks return something else; weights, buffers and random numbers
    stay as they are. A library's network is tried in training only: it returns logits, and changes only buffers.

    Returns: outputs in validation, or those in training if these have another shape.
    """
    shape = (2 if of_library else num_samples(dataset.input_shape), *dataset.input_shape)

    def drawn() -> torch.Tensor:
        if dataset.input_type == "int64":
            return torch.randint(max(1, dataset.num_tokens), shape)
        numbers = torch.randn(shape, dtype=torch.float32)  # as batches are, whatever the default is
        return numbers.permute(0, 3, 1, 2) if len(shape) == 4 else numbers

    def tried(inputs: torch.Tensor, others: torch.Tensor) -> Any:
        network.train()
        observer = noting_uses(network) if sharded else contextlib.nullcontext()
        arrays = variants_of(*(one.numpy(force=True) for one in (inputs, others)))
        variants = [inputs, *(torch.from_numpy(one).to(inputs) for one in arrays[1:])]
        try:
            if sharded and not of_library:  # on replaced parameters, so without the hooks of the network's own
                with observer:
                    network(inputs.clone())
                before.restore()
                observer = contextlib.nullcontext()
            return note_pass_state(network, before, variants, observer, in_parts=in_parts)
        finally:
            before.restore()

    return_logits(network, tuple(dataset.output_shape))
    network.to(torch.empty(0).device)
    with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), _noting_values(network):
        inputs = drawn()
        if any(map(is_lazy, network.modules())):
            network.eval()
            network(inputs)
        before = Snapshot(network, dict(network.named_buffers()) if of_library else None)
        samples, outputs, trained = (inputs, drawn()), None, None
        if not of_library:
            network.eval()
            outputs = network(inputs[:2].clone())
            before.restore()  # some count these passes as well
            trained = _tried_small(tried, samples, outputs)
        if trained is None:
            trained = tried(*samples)
    network.train()
    if isinstance(trained, WithHeads):
        trained = trained.logits
    if of_library:
        return trained
    if not isinstance(outputs, torch.Tensor):
        return outputs
    if not isinstance(trained, torch.Tensor):
        return trained
    return outputs if trained[:2].shape == outputs.shape else trained[:2]


def _tried_small(tried: Callable[..., Any], samples: Sequence[torch.Tensor], outputs: object) -> Any:
    """Return the outputs of a trial on small parts of large images, which takes a fraction of the time.

    Returns: None if the images are small, or the network needs their whole size.
    """
    height, width = samples[0].shape[2:] if samples[0].ndim == 4 else (0, 0)
    scale = _SMALL / max(1, min(height, width))
    if scale > 0.5 or not isinstance(outputs, torch.Tensor):
        return None
    sizes = [max(_SMALL, round(side * scale / _STRIDE) * _STRIDE) for side in (height, width)]
    try:
        trained = tried(*(one[:, :, : sizes[0], : sizes[1]] for one in samples))
    except Exception:  # of any kind, from a user's code; it comes again with whole images if they have it
        return None
    is_alike = isinstance(trained, torch.Tensor) and trained.shape == (len(samples[0]), *outputs.shape[1:])
    return trained if is_alike else None


class NormCheck(Check):
    """Refuses passes of one sample if a batch norm sees one value per channel and sample, where PyTorch would fail."""

    def __init__(self, network: nn.Module) -> None:
        """Take a network that `build_other` has tried."""
        self._network = network

    def check(self, session: TrainingRun) -> None:
        """Refuse a smallest pass of a single sample, which is too few for a batch norm."""
        config = session.config
        if config.output.resume and config.schedule.batch_size is config.schedule.global_batch_size is None:
            return  # the batch size is that of the run before
        if config.parallel.sync_batch_norm:
            return
        num_samples, world_size = len(session.dataset.train), session.placement.world_size
        if smallest_pass(config, num_samples, world_size) > 1:
            return
        for name, module in self._network.named_modules():
            if isinstance(module, BatchNorm) and module.training and getattr(module, _ONE_VALUE, False):
                raise UserError(
                    f"the batch norm {name} of --model {config.model} needs two samples at least in each pass of a "
                    f"rank, and a batch of {num_samples} samples has fewer; give --drop-last or another --batch-size"
                )


_ONE_VALUE = "allstep_one_value"


@contextlib.contextmanager
def _noting_values(network: nn.Module) -> Iterator[None]:
    norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
    for module in norms:
        vars(module).pop(_ONE_VALUE, None)
    handles = [module.register_forward_pre_hook(_note_values) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_values(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Note whether a batch norm sees one value per channel and sample, whatever the size of images."""
    samples, channels = inputs[0].shape[:2]
    setattr(module, _ONE_VALUE, getattr(module, _ONE_VALUE, True) and inputs[0].numel() == samples * channels)
