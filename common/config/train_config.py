"""Configuration of a training run: one frozen dataclass per group of flags.

Every field is a flag of the same name (`base_lr` is `--base-lr`) and a key of the YAML file given by `--config`
(`command_line.py` reads both). The two trainers take exactly the same flags. The types of `flag_types.py` bound
numbers; `validation.py` checks what depends on other flags or on the data.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from allstep.common.base.flag_types import (
    MAX_COUNT,
    WEEK,
    local_ranks,
    nonempty_text,
    number,
    ramp_step,
    step_range,
    whole,
)
from allstep.common.catalog.losses import best_name, loss_name, metric_name
from allstep.common.catalog.networks import WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH, model_argument, model_name
from allstep.common.config.data_config import DataConfig, redact_url

DEFAULT_BATCH_SIZE = 32

# Bounds per rank and over all ranks, because finding out that a larger batch does not fit would itself take memory.
_BATCH, _GLOBAL_BATCH = whole(1, 2**20), whole(1, 2**30)
_EPOCHS = 10**6
# Learning rates are float32: a much larger one overflows when it is scaled.
_MAX_RATE = 1e30


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of the run, batch sizes and learning rate."""

    epochs: Annotated[int, whole(1, _EPOCHS)] = 10
    """Number of passes over the training samples."""

    batch_size: Annotated[int | None, _BATCH] = None
    """Samples per rank and step; 32 if neither this nor --global-batch-size is given."""

    global_batch_size: Annotated[int | None, _GLOBAL_BATCH] = None
    """Samples per step over all ranks. Set this to get the same training curve on any number of ranks."""

    base_lr: Annotated[float, number(0, _MAX_RATE, above=True, smallest=0)] = 0.01
    """Learning rate for a global batch of 32 samples; --lr-scaling scales it to larger ones."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with the global batch (Goyal et al. 2017; Krizhevsky 2014)."""

    warmup_epochs: Annotated[float, number(0, _EPOCHS)] = 0.0
    """Number of epochs in which the learning rate rises step by step from its unscaled value."""

    lr_decay: Literal["constant", "step", "cosine", "poly", "linear", "plateau"] = "constant"
    """Shape of the learning rate after the warm-up; plateau lowers it when the validation loss stops falling."""

    lr_milestones: Annotated[tuple[float, ...], number(0, _EPOCHS)] = ()
    """step: epochs after which the learning rate falls; by default after 30/90, 60/90 and 80/90 of the run."""

    lr_step_factor: Annotated[float, number(0, 1, above=True)] = 0.1
    """step: factor by which the learning rate is multiplied at each milestone."""

    plateau_patience: Annotated[int, whole(1, MAX_COUNT)] = 10
    """plateau: epochs without a lower validation loss, or since the last change, until the learning rate falls."""

    plateau_factor: Annotated[float, number(0, 1, above=True, below=True)] = 0.1
    """plateau: factor by which the learning rate is multiplied."""

    lr_power: Annotated[float, number(0, 1000, above=True)] = 2.0
    """poly: exponent of the remaining fraction of the run."""

    final_lr: Annotated[float, number(0, _MAX_RATE)] = 0.0
    """cosine, poly, linear: learning rate at the end of the run."""

    batch_ramp: Annotated[tuple[str, ...], ramp_step] = ()
    """EPOCH:FACTOR, as in 5:2 8:4: from that epoch on, multiply the global batch by FACTOR (Smith et al. 2018). auto:
    double it after each epoch in which the measured gradient noise scale exceeds it (McCandlish et al. 2018), up to
    16 times its first size and up to a quarter of the training samples."""

    drop_last: bool = False
    """Drop the last samples of each epoch if they do not fill a global batch."""

    early_stop_patience: Annotated[int, whole(0, MAX_COUNT)] = 0
    """Stop when the validation loss has not improved for N epochs; 0 never stops early."""

    @property
    def follows_noise(self) -> bool:
        """Whether the global batch grows with the measured gradient noise scale."""
        return self.batch_ramp == ("auto",)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and gradient processing; both frameworks use the same formulas."""

    optimizer: Literal[
        "sgd", "nesterov", "adam", "adamw", "lars", "lamb", "novograd", "adagrad", "rmsprop", "muon", "program"
    ] = "sgd"
    """Update rule for the weights; docs/flags.md cites the paper of each. program stands for any other optimizer that a
    program hands to its Session."""

    momentum: Annotated[float, number(0, 1, below=True)] = 0.9
    """sgd, nesterov, lars: momentum factor."""

    grad_averaging: bool = False
    """novograd: make the first moment a mean of the normalised gradients instead of their sum."""

    weight_decay: Annotated[float, number(0, 1e6)] = 0.0
    """Weight decay factor for weights with two axes or more; biases and the scales of norms do not decay. adamw and
    muon decouple it from the gradient, lamb adds it to the update, novograd to the normalised gradient, and the other
    optimizers to the gradient."""

    clip_norm: Annotated[float | None, number(0, 1e30, above=True)] = None
    """Clip the averaged gradient over all weights to this global norm."""

    gradient_noise: Annotated[float, number(0, 1e30)] = 0.0
    """Add Gaussian noise of variance ETA / (1 + step)^0.55 to the averaged gradient (Neelakantan et al. 2015)."""

    label_smoothing: Annotated[float, number(0, 1, below=True)] = 0.0
    """Share of each training label to spread evenly over all classes (Szegedy et al. 2016)."""

    class_weights: Annotated[str | None, nonempty_text] = None
    """Weight of each class in the training loss, whose mean is over samples: balanced (n / (k n_c) for n_c of n samples
    in k classes), or a file with a number for each class in their order (.npy, or text)."""

    ema: Annotated[float | None, number(0, 1, below=True)] = None
    """Keep a moving average of the weights with this decay, and validate and save it along with the weights."""

    def slots_of(self, num_axes: int, *, is_embedding: bool = False) -> tuple[str, ...]:
        """Return the canonical names of the optimizer's state tensors for a weight with so many axes."""
        if self.optimizer == "muon":
            return ("momentum",) if num_axes == 2 and not is_embedding else _SLOTS["adamw"]
        if self.optimizer in MOMENTUM_OPTIMIZERS:
            return ("momentum",) if self.momentum else ()
        return _SLOTS[self.optimizer]


MOMENTUM_OPTIMIZERS = ("sgd", "nesterov", "lars")
"""Optimizers that keep a slot only if --momentum is above 0."""
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
"""Slots with one number per weight tensor."""


@dataclass(frozen=True)
class StrategyConfig:
    """Parallel strategy and gradient reduction; each flag names the strategies that use it, unless all do."""

    compression: Literal["none", "fp16", "bf16"] = "none"
    """horovod: compression of gradients for sending; fp16 and bf16 send them in 16 bits, bf16 all together after the
    backward pass."""

    op: Literal["average", "sum", "adasum"] = "average"
    """horovod: reduction of the gradients of all ranks. sum has the effect of average with the learning rate
    multiplied by the number of ranks. adasum (Maleki et al. 2021) needs MPI and a power of two of ranks, and has
    a different training curve than average."""

    autotune: bool = False
    """horovod: search for the fastest fusion threshold and cycle time during training."""

    elastic: bool = False
    """horovod, pytorch ddp, fsdp: continue from the newest commit when ranks are lost or join, in a job that
    horovodrun or torchrun keeps running; docs/elastic.md describes how to start one."""

    commit_every: Annotated[int, whole(1, MAX_COUNT)] = 100
    """horovod with --elastic: commit the state to memory every N steps; losing a rank costs at most N steps."""

    timeline: Path | None = None
    """horovod: file for Horovod's timeline of every gradient; `allstep timeline FILE` summarizes it."""

    compile: bool = False
    """Compile training steps when they first run, by torch.compile in PyTorch and by XLA in TensorFlow. The training
    curve stays the same within rounding, but for random numbers of layers, such as dropout. Each size of a global batch
    is compiled separately, validation is not."""

    recompute: bool = False
    """Recompute the activations of the network's blocks in the backward pass instead of storing them: less memory for
    a third more computing (Chen et al. 2016). The training curve stays the same."""

    accumulate_steps: Annotated[int, whole(1, 2**20)] = 1
    """Gradient accumulation: passes of --batch-size samples per rank before one all-reduce and optimizer step."""

    slices: Annotated[int | None, whole(1, 2**12)] = None
    """Cut every global batch into V slices, and add up their gradients in one fixed order: the results have the same
    bits on any number of ranks up to V. Each rank computes with 1 thread, or with OMP_NUM_THREADS threads."""

    audit: Annotated[float | None, number(0, 1, above=True)] = None
    """Share of steps, with --slices, whose slices the next rank computes again; if any bits differ, the job stops
    before weights change. The extra time per step is about that share of a step."""

    trace: bool = False
    """horovod, ddp, single, and with --slices mirrored, multi-worker-mirrored: write 64-bit digests of each step's
    inputs, gradients and weights, so that `allstep bisect RUN RUN` can find where two runs diverge."""

    sync_batch_norm: bool = False
    """Compute batch norm over the global batch instead of the samples of each rank or device."""

    num_gpus: Annotated[int | None, local_ranks()] = None
    """pytorch ddp, fsdp: start N processes on this host if there is no launcher; data-parallel: use N devices."""

    bucket_size: Annotated[float | None, number(0, 2**20)] = None
    """pytorch ddp, and with --slices horovod and fsdp: megabytes of gradients per all-reduce. The default is 25, and 1
    for the first bucket. A given number also sets the first bucket: if the whole network fits into it, no reduction
    overlaps with the backward pass."""

    static_graph: bool = True
    """pytorch ddp: the network uses the same parameters in every step. No effect with --accumulate-steps."""

    find_unused_parameters: bool = False
    """pytorch ddp: look in each step for parameters that the network does not use, as where it leaves out layers at
    random or trains some of them later. Without it, a step that uses others than the first one is refused."""

    gradient_as_bucket_view: bool = True
    """pytorch ddp: keep gradients in the buckets instead of copying them."""

    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """pytorch ddp: compression of gradients (powersgd: Vogels et al. 2019)."""

    stages: Annotated[int, whole(1, 16)] = 2
    """pytorch model-parallel: number of pipeline stages that the network is cut into, one process each."""

    micro_batches: Annotated[int, whole(1, 2**20)] = 4
    """pytorch model-parallel: micro-batches that a batch is cut into; fewer if the batch size is not divisible by this
    number."""

    num_devices: Annotated[int | None, local_ranks()] = None
    """tensorflow mirrored, central-storage: devices to use; without GPUs, the CPU is divided into this many devices."""

    communication: Literal["auto", "ring", "nccl"] = "auto"
    """tensorflow multi-worker-mirrored: implementation of all-reduce."""

    @property
    def num_slices(self) -> int | None:
        """Number of parts of a global batch with separate gradients; --accumulate-steps cuts each slice further."""
        return self.slices and self.slices * self.accumulate_steps


@dataclass(frozen=True)
class OutputConfig:
    """Files and reports that a run writes; without --output-dir, only lines on the terminal."""

    output_dir: Path | None = None
    """Folder for config.yaml, metrics.jsonl and checkpoints/; created if it does not exist."""

    log_every: Annotated[int, whole(0, MAX_COUNT)] = 0
    """Write loss and learning rate of every N-th step to metrics.jsonl; 0 writes only epochs."""

    tensorboard: bool = False
    """Also write TensorBoard event files to the output directory."""

    mlflow: bool = False
    """Also report to MLflow: MLFLOW_TRACKING_URI is the server or folder, MLFLOW_EXPERIMENT_NAME the
    experiment."""

    wandb: bool = False
    """Also report to Weights & Biases; WANDB_PROJECT and WANDB_MODE set the project and the mode."""

    profile: Annotated[str | None, step_range] = None
    """Profile these steps, as in 10:15, by the framework's profiler: traces for Perfetto and TensorBoard, and tables
    for allstep report, in the output directory's profile/."""

    profile_ranks: Annotated[tuple[int, ...], whole(0, MAX_COUNT)] = ()
    """Ranks to profile; default: all."""

    checkpoint_every: Annotated[int, whole(0, MAX_COUNT)] = 0
    """Save a checkpoint every N steps as well as after each epoch; 0 saves only after epochs."""

    metrics: Annotated[tuple[str, ...], metric_name] = ()
    """Metrics of the validation samples, beside accuracy or mae, as in top-5 f1 confusion-matrix; docs/evaluate.md
    lists them. Or your FILE.py:NAME with update(outputs, targets) and compute(counts)."""

    best_by: Annotated[str | None, best_name] = None
    """Metric, or loss, by which the best checkpoint is chosen; default: accuracy or mae."""

    keep_checkpoints: Annotated[int, whole(1, MAX_COUNT)] = 3
    """Number of latest checkpoints to keep, in addition to the best one by --best-by."""

    resume: str | None = None
    """Resume from a checkpoint: latest, best (both in the output directory) or a path. auto: from the latest if there
    is one, else from the start, for a batch script that is queued again."""

    init_from: Path | None = None
    """Start from the weights of a checkpoint, written by either framework, or of a safetensors file with the names of
    torchvision or timm."""


@dataclass(frozen=True)
class FaultConfig:
    """Timeouts after which a job that makes no progress is ended."""

    stall_timeout: Annotated[float, number(0, WEEK)] = 10.0
    """Seconds without progress of a rank before its watchdog ends the job and reports which ranks wait for it and where
    it is; 0 never ends the job. The first step and checkpoints may take longer."""

    fault_timeout: Annotated[float, number(3, WEEK)] = 30.0
    """Seconds until the job ends after a host has become unreachable."""


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of one training run."""

    strategy: str | None = None
    """Parallel strategy; by default horovod under a launcher, and single without one."""

    list_strategies: bool = False
    """Print the strategies and whether this machine can run each, and exit."""

    model: Annotated[str, model_name] = "cnn"
    """Network: a built-in one (docs/models.md), one of a library (timm:NAME, torchvision:NAME or keras:NAME), or your
    FILE.py:FUNCTION, which every rank imports and calls with the shape of a sample and the number of classes."""

    model_args: Annotated[tuple[str, ...], model_argument] = ()
    """Networks of libraries and your own: more arguments of the function that builds it, as in img_size=64
    drop_rate=0.1."""

    loss: Annotated[str | None, loss_name] = None
    """Training loss; by default cross-entropy for classes and tokens, and mse (mean squared error) for numbers. huber
    is linear above a difference of 1; bce has targets of 0 and 1. Or your FILE.py:FUNCTION."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes GPUs if the host has one for each of its ranks, else the CPU."""

    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"
    """Precision in which layers compute; weights, all-reduced gradients and the loss are always float32. float32 is
    IEEE float32 on every device; tf32 lets GPUs round the factors of products to 10 bits; fp16 scales the loss
    dynamically, and skips a step whose gradients overflow."""

    deterministic: bool = False
    """Use algorithms that give the same bits in every run; on GPUs, they are slower."""

    model_depth: Annotated[int, whole(10, 1000)] = WIDE_RESNET_DEPTH
    """wide-resnet: number of layers with weights, a multiple of 6 plus 4."""

    model_width: Annotated[int, whole(1, 64)] = WIDE_RESNET_WIDTH
    """wide-resnet: width as a multiple of that of a ResNet for small images."""

    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: StrategyConfig = field(default_factory=StrategyConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def strategy_name(self) -> str:
        """Strategy of the run; parsing the command line sets it to a default if the user gives none."""
        assert self.strategy is not None
        return self.strategy

    @property
    def model_size(self) -> dict[str, int]:
        """Arguments of `build_model` in addition to the network's name."""
        return {"depth": self.model_depth, "width": self.model_width}

    @property
    def same_bits(self) -> bool:
        """Whether all computation must use algorithms that give the same bits in every run."""
        return self.deterministic or self.parallel.slices is not None

    def global_batch_size(self, world_size: int) -> int:
        """Return the number of samples per optimizer step over all ranks."""
        if self.schedule.global_batch_size is not None:
            return self.schedule.global_batch_size
        return (self.schedule.batch_size or DEFAULT_BATCH_SIZE) * world_size * self.parallel.accumulate_steps

    def flat(self) -> dict[str, Any]:
        """Return the resolved configuration as one mapping of flag names to plain values that --config can read."""
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
