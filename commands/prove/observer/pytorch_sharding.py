"""Observe what makes ranks of torch.distributed differ on purpose: shards, joins, tensor parallelism, averaged weights.

Their modules are hooked when torch imports them, as they are slow to import.
"""

from collections.abc import Callable, Generator
from typing import Any

from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_wrappers import Wrappers
from allstep.commands.prove.records import AVERAGES_WEIGHTS, JOIN, TENSOR_PARALLEL, Collective, Wrapped


def hooks(observer: Observer, wrappers: Wrappers) -> dict[str, Callable[[Any], None]]:
    """Return functions that hook modules of torch once these are imported, by the module's name."""

    def observe_join(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        observer.write(Collective(JOIN, "", (), observer.line()))
        yield

    def note_fsdp(wrapper: Any, *_args: Any, **_kwargs: Any) -> None:
        wrappers.shard(wrapper.parameters())
        wrappers.cover(wrapper.parameters(), observer.line())

    def observe_average(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        observer.write(Wrapped("ModelAverager", observer.line(), AVERAGES_WEIGHTS))
        yield

    def observe_parallel(
        _model: Any, device_mesh: Any = None, *_args: Any, **_kwargs: Any
    ) -> Generator[None, Any, None]:
        if device_mesh is None or device_mesh.size() > 1:
            observer.write(Wrapped("parallelize_module", observer.line(), TENSOR_PARALLEL))
        yield

    around = observer.around
    observe_fsdp = observer.while_waiting("FullyShardedDataParallel", note_fsdp)
    return {
        "torch.distributed.algorithms.join": lambda module: replace(
            module.Join, "__init__", around("joins", observe_join)
        ),
        "torch.distributed.fsdp.fully_sharded_data_parallel": lambda module: replace(
            module.FullyShardedDataParallel, "__init__", around("FSDP", observe_fsdp)
        ),
        "torch.distributed.algorithms.model_averaging.averagers": lambda module: replace(
            module.ModelAverager, "__init__", around("averages of weights", observe_average)
        ),
        "torch.distributed.tensor.parallel.api": lambda module: replace_everywhere(
            "torch.distributed", module, "parallelize_module", around("tensor parallelism", observe_parallel)
        ),
    }
