"""The strategies of both frameworks: what everybody knows of one without importing its framework.

A strategy is declared here, once. It is a class in a file of `pytorch/strategies/` or `tensorflow/strategies/`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy."""

    module: str
    """In the framework's package `strategies`."""
    class_name: str
    """In that module."""
    flags: tuple[str, ...] = ()
    """The fields of StrategyConfig that it looks at."""
    launcher: str | None = None
    """What usually starts its ranks on one host; None where it starts them, or takes its devices, by itself."""
    num_ranks_flag: str | None = None
    """The flag that says how many ranks it starts, or devices it takes, by itself."""
    spawns: bool = False
    """Whether one process that no launcher has started starts as many ranks as that flag says."""
    least_ranks: int = 1
    most_ranks: int | None = None
    """None for any number."""
    one_process: bool = False
    """Whether it has one process, so that several would each train alone."""
    one_worker: bool = False
    """Whether all its processes together take the samples that one rank of another strategy takes."""
    synchronous: bool = True
    """Whether its curve is that of `single`."""
    measures_noise: bool = False
    """Whether the gradients of parts of a batch are seen before they meet: see `noise_scale`."""
    polls: bool = False
    """Whether its ranks take processor time while nothing is to be done."""
    why_not_compiled: str = ""
    """Where `compile` is not among its flags: why, in words that follow its name."""

    def can_have(self, num_ranks: int) -> bool:
        """Whether it runs on so many ranks, or devices of one process."""
        return self.least_ranks <= num_ranks and (self.most_ranks is None or num_ranks <= self.most_ranks)


_COMMON = ("compile", "recompute", "accumulate_steps", "slices", "audit")
_HOROVOD = (*_COMMON, "sync_batch_norm", "compression", "op", "autotune", "timeline", "elastic", "commit_every")
_DDP = (*_COMMON, "elastic", "sync_batch_norm", "num_gpus", "bucket_size", "static_graph", "gradient_as_bucket_view")

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
        "data-parallel": StrategyEntry(  # it takes all GPUs; without any it runs on one device
            "data_parallel",
            "DataParallel",
            ("accumulate_steps", "num_gpus", "slices", "audit"),
            num_ranks_flag="--num-gpus",
            most_ranks=1,
            one_process=True,
            why_not_compiled="which copies the network to its devices anew in each step",
        ),
        "model-parallel": StrategyEntry(
            "model_parallel",
            "ModelParallel",
            ("stages", "micro_batches"),
            num_ranks_flag="--stages",
            spawns=True,
            least_ranks=2,
            one_worker=True,
            why_not_compiled="whose micro-batches change in size with the batch",
        ),
        "single": StrategyEntry(
            "single", "Single", (*_COMMON, "trace"), most_ranks=1, one_process=True, measures_noise=True
        ),
    },
    "tensorflow": {
        "horovod": StrategyEntry(
            "horovod", "Horovod", (*_HOROVOD, "trace"), "horovodrun", measures_noise=True, polls=True
        ),
        "single": StrategyEntry(
            "single", "Single", (*_COMMON, "trace"), most_ranks=1, one_process=True, measures_noise=True
        ),
        "mirrored": StrategyEntry(
            "mirrored",
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
            "central_storage",
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
            least_ranks=2,
            one_worker=True,
            synchronous=False,
            why_not_compiled="whose weights lie in another process",
        ),
    },
}
FRAMEWORKS = tuple(STRATEGIES)
TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
"""The frameworks' names in messages."""


def find_framework(name: str) -> str | None:
    """The framework that has a strategy of that name; None where none has."""
    return next((framework for framework, entries in STRATEGIES.items() if name in entries), None)


def strategy_names(*, synchronous: bool = False) -> tuple[str, ...]:
    """The strategies of both frameworks, each name once; the synchronous ones alone where that is asked for."""
    items = [item for entries in STRATEGIES.values() for item in entries.items()]
    return tuple(dict.fromkeys(name for name, entry in items if entry.synchronous or not synchronous))
