"""The configuration of a training run: one frozen dataclass a group of flags.

Every field is a flag of the same name (`base_lr` is `--base-lr`) and a key of the YAML file given by `--config`
(`command_line.py` reads both). The two trainers take exactly the same flags. A number's type says how large it may be
(`flags.py`); what depends on other flags or on the data is in `validation.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from allstep.common.config.flags import EVER, WEEK, local_ranks, number, ramp_step, whole
from allstep.common.data.datasets.config import DataConfig, redact_url
from allstep.common.losses import loss_name
from allstep.common.models import WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH, model_name

DEFAULT_BATCH_SIZE = 32

# Of a rank, and of all: what is larger is refused with less memory than it would take to find out.
_BATCH, _GLOBAL_BATCH = whole(1, 2**20), whole(1, 2**30)
_EPOCHS = 10**6
# Learning rates are float32: what is far above is infinite when it is scaled; what is far below moves no weight.
_RATE_MOST = 1e30


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, in which micro_batches and with which learning rate to train."""

    epochs: Annotated[int, whole(1, _EPOCHS)] = 10
    """Number of passes over the training samples."""

    batch_size: Annotated[int | None, _BATCH] = None
    """Samples per rank and step; 32 where neither this nor --global-batch-size is given."""

    global_batch_size: Annotated[int | None, _GLOBAL_BATCH] = None
    """Samples per step over all ranks. Give this to have the same training curve on any number of ranks."""

    base_lr: Annotated[float, number(0, _RATE_MOST, above=True, smallest=0)] = 0.01
    """Learning rate for a global batch of 32 samples; --lr-scaling carries it over to larger ones."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with the global batch (Goyal et al. 2017; Krizhevsky 2014)."""

    warmup_epochs: Annotated[float, number(0, _EPOCHS)] = 0.0
    """Epochs in which the learning rate rises from its unscaled value, step by step."""

    lr_decay: Literal["constant", "step", "cosine", "poly", "linear"] = "constant"
    """What follows the warm-up."""

    lr_milestones: Annotated[tuple[float, ...], number(0, _EPOCHS)] = ()
    """step: epochs after which the learning rate falls; without any, at 30, 60 and 80 of 90 parts of the run."""

    lr_step_factor: Annotated[float, number(0, 1, above=True)] = 0.1
    """step: what the learning rate is multiplied by at each milestone."""

    lr_power: Annotated[float, number(0, 1000, above=True)] = 2.0
    """poly: exponent of the remaining part of the run."""

    final_lr: Annotated[float, number(0, _RATE_MOST)] = 0.0
    """cosine, poly, linear: the learning rate at the end of the run."""

    batch_ramp: Annotated[tuple[str, ...], ramp_step] = ()
    """EPOCH:FACTOR, as in 5:2 8:4: from that epoch on, a global batch is so many times as large (Smith et al. 2018).
    auto: it doubles after each epoch in which the measured gradient noise scale exceeds it (McCandlish et al. 2018), to
    16 times at most, and at most a quarter of the training samples."""

    drop_last: bool = False
    """Leave out the last samples of an epoch's order where they do not fill a global batch."""

    early_stop_patience: Annotated[int, whole(0, EVER)] = 0
    """Stop when the validation loss has not fallen for N epochs; 0 never stops early."""

    @property
    def follows_noise(self) -> bool:
        """Whether the batch grows with the measured gradient noise scale."""
        return self.batch_ramp == ("auto",)


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change weights; the same formulas in both frameworks."""

    optimizer: Literal[
        "sgd", "nesterov", "adam", "adamw", "lars", "lamb", "novograd", "adagrad", "rmsprop", "program"
    ] = "sgd"
    """What is done with the averaged gradient; docs/flags.md says whose formulas they are. program stands for any other
    optimizer that a program hands to its Session."""

    momentum: Annotated[float, number(0, 1, below=True)] = 0.9
    """sgd, nesterov, lars: what is kept of the steps before."""

    grad_averaging: bool = False
    """novograd: the first moment is a mean of the normalised gradients, and not their sum."""

    weight_decay: Annotated[float, number(0, 1e6)] = 0.0
    """Weight decay factor, of weights with two axes or more: biases and the scales of norms do not decay. Decoupled
    from the gradient in adamw; added to the update in lamb, to the normalised gradient in novograd, else to the
    gradient."""

    clip_norm: Annotated[float | None, number(0, 1e30, above=True)] = None
    """Scale the averaged gradient of all weights down to this norm where it is larger."""

    gradient_noise: Annotated[float, number(0, 1e30)] = 0.0
    """Add Gaussian noise of variance ETA / (1 + step)^0.55 to the averaged gradient (Neelakantan et al. 2015)."""

    label_smoothing: Annotated[float, number(0, 1, below=True)] = 0.0
    """Share of each training label that is spread over all classes evenly (Szegedy et al. 2016)."""

    ema: Annotated[float | None, number(0, 1, below=True)] = None
    """Keep a moving average of the weights with this decay, validate it and save it beside them."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Canonical names of what the optimizer remembers of each weight."""
        if self.optimizer in ("sgd", "nesterov", "lars"):
            return ("momentum",) if self.momentum else ()
        return _SLOTS[self.optimizer]


_SLOTS = {
    **dict.fromkeys(("adam", "adamw", "lamb"), ("exp_avg", "exp_avg_sq")),
    "novograd": ("momentum", "layer_exp_avg_sq"),
    "adagrad": ("sum_of_squares",),
    "rmsprop": ("square_avg",),
    "program": (),
}
OWN_OPTIMIZER = "program"
"""The optimizer of a user's program, whose state is known by its own names."""
LAYER_SLOTS = ("layer_exp_avg_sq",)
"""Slots that are one number a weight."""


@dataclass(frozen=True)
class StrategyConfig:
    """How gradients meet; each flag says for which strategies it is."""

    compression: Literal["none", "fp16"] = "none"
    """horovod: send gradients as they are, or in half precision."""

    op: Literal["average", "sum", "adasum"] = "average"
    """horovod: what is done with the gradients of all ranks. sum moves the weights by the number of ranks times what
    average does, as if the learning rate were that much larger. adasum (Maleki et al. 2021) needs MPI and a power of
    two of ranks, and has another curve than average."""

    autotune: bool = False
    """horovod: let Horovod search for the fastest fusion threshold and cycle time while it trains."""

    elastic: bool = False
    """horovod, pytorch ddp, fsdp: go on from the newest commit when ranks are lost, and with whoever comes, in a job
    that horovodrun or torchrun keeps going; docs/elastic.md says how to start one."""

    commit_every: Annotated[int, whole(1, EVER)] = 100
    """horovod, --elastic: keep the state in the memory of every rank after each N-th step: what a lost rank costs."""

    timeline: Path | None = None
    """horovod: file for Horovod's timeline of every gradient's way; `allstep timeline FILE` sums it up."""

    compile: bool = False
    """Have steps compiled when they first run: by torch.compile in PyTorch, by XLA in TensorFlow. The curve is the same
    within rounding. There is a program for each size of a global batch, and validation is not compiled."""

    recompute: bool = False
    """Forget what the blocks of a network compute, and compute it again when gradients are: less memory for a third
    more computing (Chen et al. 2016). The curve is the same."""

    accumulate_steps: Annotated[int, whole(1, 2**20)] = 1
    """Passes of --batch-size samples a rank whose gradients are added up before one all-reduce and optimizer step."""

    slices: Annotated[int | None, whole(1, 2**12)] = None
    """Cut every global batch into V slices, whose gradients are computed one by one and added up in one fixed order:
    the same bits on any number of ranks up to V. Ranks compute with 1 thread, or as many as OMP_NUM_THREADS says."""

    audit: Annotated[float | None, number(0, 1, above=True)] = None
    """With --slices: have the slices of this share of steps computed again by the next rank, and stop the job where any
    bits differ, before weights change. Costs about that share of a step."""

    trace: bool = False
    """horovod, ddp, single, and with --slices mirrored, multi-worker-mirrored: keep 64-bit digests of what goes into
    each step, of gradients and of weights, by which `allstep bisect RUN RUN` finds where two runs part."""

    sync_batch_norm: bool = False
    """Batch norm over the global batch instead of each rank's, or device's, slice."""

    num_gpus: Annotated[int | None, local_ranks()] = None
    """pytorch ddp, fsdp: without a launcher, start N processes on this host; data-parallel: use N devices."""

    bucket_size: Annotated[float | None, number(0, 2**20)] = None
    """pytorch ddp, and with --slices horovod and fsdp: megabytes of gradients that are reduced together; by default 25,
    and 1 for those that come first. A number holds for all: a network that fits into one bucket then reduces nothing
    beside its backward pass."""

    static_graph: bool = True
    """pytorch ddp: the network uses the same parameters in every step. Without effect under --accumulate-steps."""

    gradient_as_bucket_view: bool = True
    """pytorch ddp: gradients live in the buckets and are not copied."""

    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """pytorch ddp: how gradients are compressed (powersgd: Vogels et al. 2019)."""

    stages: Annotated[int, whole(1, 16)] = 2
    """pytorch model-parallel: parts into which the network is cut, one process each."""

    micro_batches: Annotated[int, whole(1, 2**20)] = 4
    """pytorch model-parallel: micro-batches of a batch that are under way in the stages at once; fewer where its size
    has no such divisor."""

    num_devices: Annotated[int | None, local_ranks()] = None
    """tensorflow mirrored, central-storage: devices to use; CPUs are divided into as many where there are no GPUs."""

    communication: Literal["auto", "ring", "nccl"] = "auto"
    """tensorflow multi-worker-mirrored: how all-reduce is done."""

    @property
    def num_slices(self) -> int | None:
        """Parts of a global batch that have a gradient of their own; --accumulate-steps cuts each slice further."""
        return self.slices and self.slices * self.accumulate_steps


@dataclass(frozen=True)
class OutputConfig:
    """What a run leaves behind; without --output-dir nothing but the lines on the terminal."""

    output_dir: Path | None = None
    """Folder for config.yaml, metrics.jsonl and checkpoints/; created where it does not exist."""

    log_every: Annotated[int, whole(0, EVER)] = 0
    """Write loss and learning rate of every N-th step to metrics.jsonl; 0 writes epochs only."""

    tensorboard: bool = False
    """Write TensorBoard's event files to the output directory, too."""

    mlflow: bool = False
    """Report to MLflow, too, to the server or folder and the experiment of MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME."""

    wandb: bool = False
    """Report to Weights & Biases, too, to the project and in the mode of WANDB_PROJECT and WANDB_MODE."""

    checkpoint_every: Annotated[int, whole(0, EVER)] = 0
    """Save a checkpoint after every N-th step besides those after each epoch; 0 saves after epochs only."""

    keep_checkpoints: Annotated[int, whole(1, EVER)] = 3
    """Number of the last checkpoints to keep; the best one by validation accuracy is kept besides."""

    resume: str | None = None
    """Go on from a checkpoint: latest, best (both in the output directory) or a path."""

    init_from: Path | None = None
    """Start from the weights of a checkpoint, written by either framework, or of a safetensors file whose names are
    torchvision's or timm's."""


@dataclass(frozen=True)
class FaultConfig:
    """When a run that does not go on is ended."""

    stall_timeout: Annotated[float, number(0, WEEK)] = 10.0
    """Seconds without progress after which a rank that the others wait for ends the job, with a report of who waits
    and where the missing rank is; 0 never ends it. The first step and checkpoints may take longer."""

    fault_timeout: Annotated[float, number(3, WEEK)] = 30.0
    """Seconds within which the job ends when a host cannot be reached any more."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    strategy: str | None = None
    """How the ranks are formed and gradients meet; horovod under a launcher and single without where not given."""

    list_strategies: bool = False
    """Print the strategies and whether this machine can run each, and do nothing else."""

    model: Annotated[str, model_name] = "cnn"
    """The network: one of the suite's (docs/models.md), one of a library's by timm:NAME, torchvision:NAME or
    keras:NAME, or FILE.py:FUNCTION of your own, which every rank imports and calls with the shape of a sample and the
    number of classes."""

    loss: Annotated[str | None, loss_name] = None
    """What training makes small; by default cross-entropy for classes and tokens, mse (the mean of squared differences)
    for numbers. huber is linear from a difference of 1 on; bce has targets of 0 and 1. Or FILE.py:FUNCTION of
    your own."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """On what to train; auto takes GPUs where every rank of a host gets its own, else the CPU."""

    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"
    """In which layers compute; weights, gradients between ranks and the loss are float32 in any case. float32 is IEEE's
    on every device; tf32 has GPUs round the factors of products to 10 bits; fp16 scales the loss dynamically, and skips
    a step whose gradients overflow."""

    deterministic: bool = False
    """Compute by algorithms that give the same bits in every run, also on GPUs, where they take longer."""

    model_depth: Annotated[int, whole(10, 1000)] = WIDE_RESNET_DEPTH
    """wide-resnet: layers with weights, 4 more than a multiple of 6."""

    model_width: Annotated[int, whole(1, 64)] = WIDE_RESNET_WIDTH
    """wide-resnet: by how much it is wider than a ResNet for small images."""

    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: StrategyConfig = field(default_factory=StrategyConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def strategy_name(self) -> str:
        """The strategy, which has been chosen where the user did not, once the command line is read."""
        assert self.strategy is not None
        return self.strategy

    @property
    def model_size(self) -> dict[str, int]:
        """What `build_model` takes beside the network's name."""
        return {"depth": self.model_depth, "width": self.model_width}

    @property
    def same_bits(self) -> bool:
        """Whether all is to be computed by algorithms that give the same bits in every run."""
        return self.deterministic or self.parallel.slices is not None

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step over all ranks."""
        if self.schedule.global_batch_size is not None:
            return self.schedule.global_batch_size
        return (self.schedule.batch_size or DEFAULT_BATCH_SIZE) * world_size * self.parallel.accumulate_steps

    def flat(self) -> dict[str, Any]:
        """The resolved configuration as one mapping of flag names to plain values, as --config reads it."""
        flat: dict[str, Any] = {}
        for part in (self, self.data, self.schedule, self.optimizer, self.parallel, self.output, self.faults):
            for item in dataclasses.fields(part):
                value = getattr(part, item.name)
                if item.name == "mirror" and value:
                    value = redact_url(value)
                if not dataclasses.is_dataclass(value) and item.name != "list_strategies":
                    plain = str(value) if isinstance(value, Path) else value
                    flat[item.name.replace("_", "-")] = list(plain) if isinstance(plain, tuple) else plain
        return flat
