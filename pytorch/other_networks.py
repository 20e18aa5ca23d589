"""Networks from a user's file, from timm or from torchvision; `tensorflow/other_networks.py` has those for Keras.

Weights have PyTorch's names. The network draws its initial weights by --seed, and all ranks start from those of rank 0.
If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the
suite's canonical weights, so that their curves can be compared.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.base.terminal import print_line, warn
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import cannot_build, check_outputs, network_of_user, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.opening import smallest_pass
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import are_probabilities
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.network_state import check, is_lazy, make_dense
from allstep.pytorch.kept.pass_state import PassState, note_pass_state, pass_state
from allstep.pytorch.kept.snapshot import Snapshot
from allstep.pytorch.kept.uses import noting_uses
from allstep.pytorch.outputs import WithHeads, return_logits


def build_other(
    model: str,
    dataset: Dataset,
    seed: int,
    own: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    warns: bool = True,
    sharded: bool = True,
) -> nn.Module:
    """Build the network that `model` names and try it on two samples of random numbers.

    Args:
        model: FILE.py:FUNCTION, timm:NAME or torchvision:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.
        warns: whether to warn of a softmax at the end, and of state that checkpoints lack.
        sharded: whether the strategy has to know how weights are used (see `kept.uses`).

    Raises:
        UserError: no network has that name, it cannot be built, or its outputs do not fit the data set.
    """
    torch.manual_seed(seed)
    if own is not None or user_file.parse(model):
        network = network_of_user(model, "pytorch", dataset, own, options or {}, kind=nn.Module)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"expected a torch.nn.Module from --model {model}, received {type(network).__name__}; return one"
            )
        _check_weights(network, model)
        outputs = user_file.call(_outputs, network, dataset, sharded, flag=f"--model {model}")
    else:
        network, outputs = _of_library(model, dataset, options or {}, seed, sharded=sharded)
    logits = outputs.float().numpy(force=True) if isinstance(outputs, torch.Tensor) else None
    if warns and dataset.task == "classification" and logits is not None and are_probabilities(logits):
        warn(
            f"--model {model} seems to end in a softmax: its outputs add up to 1, where the loss expects logits; leave "
            "the softmax out"
        )
    if warns and (forgotten := pass_state(network).forgotten):
        warn(
            f"--model {model} changes {forgotten[0]} in training, which its state_dict() lacks: checkpoints lack it, "
            "and a resumed run begins with its first value; register it as a buffer, or return it from get_extra_state"
        )
    check_outputs(model, tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else None, dataset)
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
            print_line(f"allstep: --model {model} is built for images of {height} x {width} pixels", sys.stderr)
        return network, outputs


def _outputs(network: nn.Module, dataset: Dataset, sharded: bool, of_library: bool = False) -> object:
    """Move the network to the default device, and return its outputs for two samples of random numbers.

    It is tried in training as well, where some networks return something else; weights, buffers and random numbers
    stay as they are. A library's returns logits in validation, and changes nothing but buffers in training.

    Returns: outputs in validation, or those in training if these have another shape.
    """
    shape = (2, *dataset.input_shape)

    def drawn() -> torch.Tensor:
        if dataset.input_type == "int64":
            return torch.randint(max(1, dataset.num_tokens), shape)
        return torch.randn(shape).permute(0, 3, 1, 2) if len(shape) == 4 else torch.randn(shape)

    return_logits(network, tuple(dataset.output_shape))
    network.to(torch.empty(0).device)
    with torch.no_grad(), torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        inputs = drawn()
        if any(map(is_lazy, network.modules())):
            network.eval()(inputs)
        before = Snapshot(network, dict(network.named_buffers()) if of_library else None)
        others, outputs = torch.cat([inputs[:1], drawn()[1:]]), None
        if not of_library:
            outputs = network.eval()(inputs)
            before.restore()  # some count these passes as well
        observer = noting_uses(network) if sharded else contextlib.nullcontext()
        with _noting_values(network):
            trained = note_pass_state(network.train(), before, inputs, others, observer)
        before.restore()
    network.train()
    if isinstance(trained, WithHeads):
        trained = trained.logits
    if of_library or not (isinstance(trained, torch.Tensor) and isinstance(outputs, torch.Tensor)):
        return trained if of_library else None
    return outputs if trained.shape == outputs.shape else trained


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


def _check_weights(network: nn.Module, model: str) -> None:
    check(network, model)
    make_dense(network)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: nn.Module) -> None:
        """Take a network, which needs no handle here because it draws from PyTorch's global generators."""

    def on_start(self, session: TrainingRun) -> None:
        torch.manual_seed(step_seed(session.config.data.seed, session.progress.step, session.placement.rank))

    on_step = on_start


class NormCheck(Hook):
    """Refuses passes of one sample for a batch norm that sees one value a channel and sample, where PyTorch fails.

    And parts of a batch for a network that sets weights from its first samples, as activation norms do, and several
    passes a step for one that counts them.
    """

    def __init__(self, network: nn.Module) -> None:
        """Take a network that `build_other` has tried."""
        self._network = network

    def on_start(self, session: TrainingRun) -> None:
        """Check the passes of a step.

        Raises:
            UserError: one has a single sample, which is too few for a batch norm, or a part of those that set weights,
                or there are several where passes are counted.
        """
        config = session.config
        num_parts = config.parallel.num_slices or session.placement.world_size * config.parallel.accumulate_steps
        state, weights = pass_state(self._network), dict(self._network.named_parameters())
        for name in state.sampled if num_parts > 1 else ():
            if name not in weights:
                raise UserError(
                    f"--model {config.model} changes {name} by the samples of each pass, of which each rank or pass "
                    "would see a part; train in one process without --accumulate-steps and --slices, or give it a name "
                    f"that begins with running_ if its mean over ranks will do"
                )
            if not session.progress.step:
                raise UserError(
                    f"--model {config.model} sets {name} from its first samples, of which each rank or pass would see "
                    "a part; begin in one process without --accumulate-steps and --slices, and go on from there by "
                    "--resume"
                )
        if state.repeated and config.parallel.slices:
            raise UserError(
                f"--model {config.model} changes {min(state.repeated)} in each pass, of which --slices takes several a "
                "step; leave it out"
            )
        if num_parts > 1 and session.placement.rank == 0:
            _tell(state, config.model)
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


def _tell(state: PassState, model: str) -> None:
    """Warn of what makes several ranks or passes something else than one with the whole batch."""
    if state.couples:
        warn(
            f"--model {model} computes the samples of a pass together, of which each rank or pass has a part: it is "
            "not trained as in one process with the whole batch"
        )
    if state.hooked:
        warn(
            f"--model {model} has hooks for the gradient of {state.hooked}, which see that of each rank or pass, "
            "before they are averaged"
        )


_ONE_VALUE = "allstep_one_value"


@contextlib.contextmanager
def _noting_values(network: nn.Module) -> Iterator[None]:
    norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
    handles = [module.register_forward_pre_hook(_note_values) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_values(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Note whether a batch norm sees one value a channel and sample."""
    samples, channels = inputs[0].shape[:2]
    setattr(module, _ONE_VALUE, inputs[0].numel() == samples * channels)
