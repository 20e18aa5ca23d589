"""Table of the strategies of both frameworks, readable without importing a framework.

Each strategy is declared here once, and is a class in a file of `pytorch/strategies/` or `tensorflow/strategies/`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig
    from allstep.common.launch.placement import Placement


@dataclass(frozen=True)
class StrategyEntry:
    """Description of a strategy."""

    module: str
    """Module in the framework's package `strategies`."""
    class_name: str
    """Class in that module."""
    flags: tuple[str, ...] = ()
    """Fields of `StrategyConfig` that the strategy uses."""
    launcher: str | None = None
    """Usual launcher of its ranks on one host; None if the strategy starts its ranks or takes its devices itself."""
    num_ranks_flag: str | None = None
    """Flag for the number of ranks that the strategy itself starts, or of devices that it takes."""
    spawns: bool = False
    """Whether a process without a launcher starts the number of ranks given by that flag."""
    min_ranks: int = 1
    max_ranks: int | None = None
    """Maximum number of ranks; None for any number."""
    one_process: bool = False
    """Whether it runs in one process, so that several processes would train independently."""
    one_worker: bool = False
    """Whether all its processes together take the samples that a single rank of other strategies takes."""
    synchronous: bool = True
    """Whether its training curve is that of `single`."""
    measures_noise: bool = False
    """Whether gradients of parts of a batch can be seen before they are averaged; see `common.recipe.noise_scale`."""
    polls: bool = False
    """Whether idle ranks use processor time."""
    why_not_compiled: str = ""
    """Reason, as a relative clause after its name, if `compile` is not among its flags."""

    def can_have(self, num_ranks: int) -> bool:
        """Return whether the strategy runs on `num_ranks` ranks, or devices of one process."""
        return self.min_ranks <= num_ranks and (self.max_ranks is None or num_ranks <= self.max_ranks)


_COMMON = ("compile", "recompute", "accumulate_steps", "slices", "audit")
_HOROVOD = (*_COMMON, "sync_batch_norm", "compression", "op", "autotune", "timeline", "elastic", "commit_every")
_BUCKETS = ("bucket_size", "static_graph", "find_unused_parameters", "gradient_as_bucket_view")
_DDP = (*_COMMON, "elastic", "sync_batch_norm", "num_gpus", *_BUCKETS)
_SINGLE = StrategyEntry("strategy", "Single", (*_COMMON, "trace"), max_ranks=1, one_process=True, measures_noise=True)

STRATEGIES: dict[str, dict[str, StrategyEntry]] = {
    "pytorch": {
        "horovod": StrategyEntry(
            "horovod", "Horovod", (*_HOROVOD, "trace", "bucket_size"), "horovodrun", measures_noise=True, polls=True
        ),
        "ddp": StrategyEntry(
            "ddp", "DDP", (*_DDP, "comm_hook", "trace"), "torchrun", "--num-gpus", spawns=True, measures_noise=True
        ),
        "fsdp": StrategyEntry(
            "fsdp",
            "FSDP",
            ("compile", "accumulate_steps", "slices", "audit", "sync_batch_norm", "num_gpus", "bucket_size", "elastic"),
            "torchrun",
            "--num-gpus",
            spawns=True,
        ),
        "data-parallel": StrategyEntry(  # takes all GPUs; without any, it runs on one device
            "data_parallel",
            "DataParallel",
            ("accumulate_steps", "num_gpus", "slices", "audit"),
            num_ranks_flag="--num-gpus",
            max_ranks=1,
            one_process=True,
            why_not_compiled="which copies the network to its devices again in each step",
        ),
        "model-parallel": StrategyEntry(
            "model_parallel",
            "ModelParallel",
            ("stages", "micro_batches"),
            num_ranks_flag="--stages",
            spawns=True,
            min_ranks=2,
            one_worker=True,
            why_not_compiled="whose micro-batches change in size with the batch",
        ),
        "single": _SINGLE,
    },
    "tensorflow": {
        "horovod": StrategyEntry(
            "horovod", "Horovod", (*_HOROVOD, "trace"), "horovodrun", measures_noise=True, polls=True
        ),
        "single": _SINGLE,
        "mirrored": StrategyEntry(
            "distribute",
            "Mirrored",
            (*_COMMON, "trace", "sync_batch_norm", "num_devices"),
            num_ranks_flag="--num-devices",
            one_process=True,
            measures_noise=True,
        ),
        "multi-worker-mirrored": StrategyEntry(
            "multi_worker_mirrored",
            "MultiWorkerMirrored",
            (*_COMMON, "trace", "sync_batch_norm", "communication"),
            "horovodrun",
            measures_noise=True,
        ),
        "central-storage": StrategyEntry(
            "distribute",
            "CentralStorage",
            ("accumulate_steps", "sync_batch_norm", "num_devices", "slices", "audit"),
            num_ranks_flag="--num-devices",
            one_process=True,
            why_not_compiled="whose devices read weights that lie on another one",
        ),
        "parameter-server": StrategyEntry(
            "parameter_server",
            "ParameterServer",
            ("accumulate_steps",),
            "horovodrun",
            min_ranks=2,
            one_worker=True,
            synchronous=False,
            why_not_compiled="whose weights lie in another process",
        ),
    },
}
FRAMEWORKS = tuple(STRATEGIES)
TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
"""Names of the frameworks in messages."""


def create(framework: str, config: TrainConfig, placement: Placement, **options: Any) -> Any:
    """Import the configured strategy and return it; `options` are further arguments of its class."""
    entry = STRATEGIES[framework][config.strategy_name]
    module = importlib.import_module(f"allstep.{framework}.strategies.{entry.module}")
    return getattr(module, entry.class_name)(placement, config.parallel, device=config.device, **options)


def find_framework(name: str) -> str | None:
    """Return the framework that has a strategy of that name, or None."""
    return next((framework for framework, entries in STRATEGIES.items() if name in entries), None)


def strategy_names(*, synchronous: bool = False) -> tuple[str, ...]:
    """Return the names of the strategies of both frameworks, without duplicates; only synchronous ones if asked for."""
    items = [item for entries in STRATEGIES.values() for item in entries.items()]
    return tuple(dict.fromkeys(name for name, entry in items if entry.synchronous or not synchronous))
