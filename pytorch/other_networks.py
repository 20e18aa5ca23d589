"""Networks from a user's file, from timm or from torchvision; `tensorflow/other_networks.py` has those for Keras.

Weights have PyTorch's names. The network draws its initial weights by --seed, and all ranks start from those of rank 0.
If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the
suite's canonical weights, so that their curves can be compared.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.base.terminal import note
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import cannot_build, check_outputs, network_of_user, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Check, Hook
from allstep.common.training.opening import smallest_pass
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import TRIAL, are_probabilities, num_samples, variants_of
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.network_state import check, is_lazy, make_dense
from allstep.pytorch.kept.pass_state import note_pass_state, pass_state
from allstep.pytorch.kept.snapshot import Snapshot
from allstep.pytorch.kept.uses import noting_uses
from allstep.pytorch.losses import WithHeads, return_logits

_SMALL, _STRIDE = 64, 32
"""Pixels of the shorter side of the small images of a trial, and what their sides are multiples of."""


def build_other(
    model: str,
    dataset: Dataset,
    seed: int,
    own: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    sharded: bool = True,
    in_parts: bool = True,
) -> nn.Module:
    """Build the network that `model` names and try it on two samples of random numbers.

    Raises UserError if no network has that name, it cannot be built, or its outputs do not fit the data set.

    Args:
        model: FILE.py:FUNCTION, timm:NAME or torchvision:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.
        sharded: whether the strategy has to know how weights are used (see `kept.uses`).
        in_parts: whether a batch may be computed in parts, so that what these would change is tried as well.
    """
    torch.manual_seed(seed)
    if own is not None or user_file.parse(model):
        network = network_of_user(model, "pytorch", dataset, own, options or {}, kind=nn.Module)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"expected a torch.nn.Module from --model {model}, received {type(network).__name__}; return one"
            )
        _check_wrappers(network, model)
        _check_weights(network, model)
        expected = f"a network for samples of shape {dataset.input_shape}"
        outputs = user_file.call(
            _outputs, network, dataset, sharded, in_parts=in_parts, flag=f"--model {model}", expected=expected
        )
    else:
        network, outputs = _of_library(model, dataset, options or {}, seed, sharded=sharded)
    logits = outputs.float().numpy(force=True) if isinstance(outputs, torch.Tensor) else np.zeros(0)
    vars(network)[TRIAL] = dataclasses.replace(pass_state(network), ends_in_softmax=are_probabilities(logits))
    check_outputs(model, outputs, dataset)
    if unused := next((name for name, module in network.named_modules() if is_lazy(module)), None):
        raise UserError(
            f"expected all lazy layers of --model {model} to be used, received {unused}, whose shapes are not known "
            "after a pass; give it its sizes, or remove it"
        )
    _check_weights(network, model)  # again, since lazy layers have weights now
    return network


def _of_library(
    model: str, dataset: Dataset, options: Mapping[str, Any], seed: int, *, sharded: bool
) -> tuple[nn.Module, object]:
    """Return a library's network and its outputs; one that needs to know the size of images is told."""
    library, _, name = model.partition(":")
    build = {"timm": _timm, "torchvision": _torchvision}[library]
    try:
        network = build(name, dataset, options)
        return network, _outputs(network, dataset, sharded, of_library=True)
    except UserError:
        raise
    except Exception as error:
        height, width, *_ = (*dataset.input_shape, 0)
        size = {"img_size": (height, width)} if library == "timm" else {"image_size": height}
        try:
            torch.manual_seed(seed)
            network = build(name, dataset, {**size, **options})
            outputs = _outputs(network, dataset, sharded, of_library=True)
        except Exception:
            raise cannot_build(model, dataset, error) from error
        if apparent_rank() == 0:
            note(f"--model {model} is built for images of {height} x {width} pixels")
        return network, outputs


def _outputs(
    network: nn.Module, dataset: Dataset, sharded: bool, *, of_library: bool = False, in_parts: bool = False
) -> object:
    """Move the network to the default device, and return its outputs for two samples of random numbers.

    It is tried in training as well, where some networks return something else; weights, buffers and random numbers
    stay as they are. A library's returns logits in validation, and changes nothing but buffers in training.

    Returns: outputs in validation, or those in training if these have another shape.
    """
    shape = (2 if of_library else num_samples(dataset.input_shape), *dataset.input_shape)

    def drawn() -> torch.Tensor:
        if dataset.input_type == "int64":
            return torch.randint(max(1, dataset.num_tokens), shape)
        return torch.randn(shape).permute(0, 3, 1, 2) if len(shape) == 4 else torch.randn(shape)

    def tried(inputs: torch.Tensor, others: torch.Tensor) -> Any:
        network.train()
        observer = noting_uses(network) if sharded else contextlib.nullcontext()
        arrays = variants_of(*(one.numpy(force=True) for one in (inputs, others)))
        variants = [inputs, *(torch.from_numpy(one).to(inputs) for one in arrays[1:])]
        try:
            if sharded and not of_library:  # on parameters in place of the network's, which have its hooks
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
    if of_library or not (isinstance(trained, torch.Tensor) and isinstance(outputs, torch.Tensor)):
        return trained if of_library or isinstance(outputs, torch.Tensor) else outputs
    return outputs if trained[:2].shape == outputs.shape else trained[:2]


def _tried_small(tried: Callable[..., Any], samples: Sequence[torch.Tensor], outputs: object) -> Any:
    """Return the outputs of a trial on small parts of large images, which takes a fraction of the time.

    Returns: None if the images are small, or if the network computes otherwise with images of another size.
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


def _timm(name: str, dataset: Dataset, options: Mapping[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise unknown_name(f"timm:{name}", timm.list_models())
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=_channels(dataset), **options)


def _torchvision(name: str, dataset: Dataset, options: Mapping[str, Any]) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise unknown_name(f"torchvision:{name}", names)
    network = models.get_model(name, weights=None, num_classes=dataset.num_classes, **options)
    if _channels(dataset) != 3:
        _take_channels(network, _channels(dataset))
    return network


def _channels(dataset: Dataset) -> int:
    if len(dataset.input_shape) != 3:
        raise ValueError("it is for images")
    return dataset.input_shape[2]


def _take_channels(network: nn.Module, channels: int) -> None:
    """Replace the first convolution of a torchvision network, which takes three channels, by one for `channels`."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                shape = (child.kernel_size, child.stride, child.padding)
                first = nn.Conv2d(channels, child.out_channels, *cast("Any", shape), bias=child.bias is not None)
                setattr(module, name, first)
                return


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _check_wrappers(network: nn.Module, model: str) -> None:
    """Refuse modules that exchange gradients by themselves, when the strategy does not see it."""
    for name, module in network.named_modules():
        if found := {kind.__name__ for kind in type(module).__mro__} & _WRAPPERS:
            raise UserError(
                f"expected a network from --model {model} that --strategy can wrap, received {name or 'it'} in a "
                f"{found.pop()} already; give the module without it"
            )


def _check_weights(network: nn.Module, model: str) -> None:
    check(network, model)
    make_dense(network, model)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


class Reseed(Hook):
    """Reseeds global generators in each step by seed, step and rank, so that layers of a resumed run draw the same."""

    def __init__(self, network: nn.Module) -> None:
        """Take a network, which needs no handle here."""

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    on_step = on_epoch = on_start  # validation may draw as well


class NormCheck(Check):
    """Refuses passes of one sample for a batch norm that sees one value a channel and sample, where PyTorch fails."""

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
    """Note whether a batch norm sees one value a channel and sample, whatever the size of images."""
    samples, channels = inputs[0].shape[:2]
    setattr(module, _ONE_VALUE, getattr(module, _ONE_VALUE, True) and inputs[0].numel() == samples * channels)
