"""Records that an observed rank writes in order: a frozen dataclass for each kind of event, one JSON object per line.

Digests are 64 bits in hexadecimal digits. A line of the script is written FILE:NUMBER.
"""

from dataclasses import dataclass, field

Projections = tuple[float, ...]
"""Products of a tensor's values, or of some of them, with fixed directions. They are linear: means can be compared."""

BACKWARD = "the backward pass"
"""Name of the wait in which a rank computes gradients, and may wait for others."""
JOIN = "join"
"""Kind of the collective by which a rank waits, after its last batch, for ranks that have more."""
HOROVOD_JOIN = f"hvd.{JOIN}"
"""Name of the wait in Horovod's join."""
ADASUM = "adasum"
"""Operation of a reduction of Horovod that is neither a mean nor a sum."""
RUNNING = ("running_mean", "running_var")
"""Ends of the names of running statistics."""
FROZEN = "frozen "
"""Begin of the names of weights that are not trained, among buffers."""
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
"""Kinds of collectives by which one rank gives values to another."""
TENSOR_PARALLEL = "tensor parallel"
"""Operation of a wrapper by which ranks share the work on the same samples."""
APPLIED = "applied"
"""Kind of an early change: an optimizer has applied gradients in a step of its own."""
FOLLOWS_LOSSES = "whether learning rates fall as on one rank"
"""Name of what is not compared where a scheduler lowers rates when losses stay the same."""
BY_LOSSES = "they follow the losses"
"""Reason why it is not."""
SHARED = "shared"
"""Operation of a step on weights that processes share in memory, without a wrapper (Hogwild)."""
UNNAMED = "parameter "
"""Begin of the names of weights that are in no model."""
AVERAGES_WEIGHTS = "weights"
"""Operation of a wrapper that averages weights, not gradients."""


class Record:
    """An event of a rank."""


@dataclass(frozen=True)
class Started(Record):
    """A process of the script writes its first record."""

    pid: int
    rank: int
    """Rank according to the environment variables of its launcher."""


@dataclass(frozen=True)
class World(Record):
    """A library has been initialised."""

    library: str
    rank: int
    size: int
    line: str
    makers: tuple[str, ...] = ()
    """Modules that were making the process group, from the outermost to the innermost, such as accelerate.state."""


@dataclass(frozen=True)
class Wrapped(Record):
    """A wrapper that averages gradients has been made."""

    kind: str
    line: str
    operation: str = "average"
    """The requested reduction: average, sum or ADASUM; for others TENSOR_PARALLEL or AVERAGES_WEIGHTS."""
    finds_unused: bool = False
    """Value of DDP's find_unused_parameters."""
    keeps_buffers: bool = False
    """Whether DDP is asked not to send rank 0's buffers to the other ranks."""
    by_library: bool = False
    """Whether a library has made it."""
    ranks: tuple[int, ...] = ()
    """Ranks of DDP's process group."""


@dataclass(frozen=True)
class Restored(Record):
    """An elastic state of Horovod has been made, which restores what it holds when ranks are lost or added."""

    kinds: tuple[str, ...]
    """Classes of the handlers of what it holds, such as SamplerStateHandler; others are plain values."""
    line: str


@dataclass(frozen=True)
class Sampler:
    """The sampler that decides which samples a loader reads."""

    kind: str
    shuffles: bool
    num_replicas: int | None = None
    """Number of replicas of a DistributedSampler; rank, seed and epoch are also set for that class only."""
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    reads_all: bool = False
    """Whether this rank's sampler draws every sample of the data set once per epoch."""


@dataclass(frozen=True)
class Loop(Record):
    """The iteration over a loader, or an epoch of Keras' fit, begins."""

    number: int
    """Number of the loop, from 1, in the order in which loops begin."""
    line: str
    num_batches: int | None
    """Number of batches that the loop would have if it were not cut."""
    num_samples: int | None = None
    """Number of samples in the data set."""
    sampler: Sampler | None = None
    may_end_early: bool = False
    """Whether the script itself limits an epoch, by leaving its loop or by giving fit a number of steps."""
    data: int = 0
    """Number of the data set, from 1, in the order of first loops; 0 if unknown."""
    num_workers: int = 0
    """Number of the loader's worker processes."""
    num_epochs: int = 0
    """Number of epochs that fit was given; 0 if unknown."""


@dataclass(frozen=True)
class LoopEnd(Record):
    """The loader of a loop has ended; a loop that the script leaves has no such record."""

    loop: int
    num_batches: int
    is_cut: bool
    """Whether allstep has ended it."""


@dataclass(frozen=True)
class Held(Record):
    """Digests of a rank's training data at evenly spaced positions, nearly all with different contents."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class Batch(Record):
    """A loader has drawn the indices of a batch."""

    loop: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Yielded(Record):
    """A loader has yielded a batch."""

    loop: int
    rows: tuple[str, ...]
    """Digest of each sample."""
    random_states: tuple[str, ...] = ()
    """Digests of the states of random generators before the batch was read, empty for those that are as they were
    before the last batch."""


@dataclass(frozen=True)
class Forward(Record):
    """A model has been called, or a loss that has buffers, of which no samples are recorded."""

    step: int
    """Number of the next step, from 1."""
    loop: int
    """Number of the loop that was going on; 0 outside of all loops."""
    is_training: bool
    """Whether gradients can be computed from the outputs."""
    rows: tuple[str, ...]
    """Digest of each sample, over all inputs that are not constant."""
    random_state: str | None
    """Digest of the random state before the call, if the call drew from it."""
    buffers: dict[str, str]
    """Digests after the call: in evaluation of running statistics, in training of floating-point buffers and of frozen
    weights, for the first calls of a model."""
    bypasses: str | None
    """The wrapper that holds this model, if the model was called without it."""
    line: str
    callers: tuple[str, ...] = ()
    """All lines of the script that were being run, from the innermost to the outermost."""
    evaluates: bool | None = None
    """Whether the framework calls the model to validate it; None if the script calls it by itself."""
    in_eval: bool = True
    """Whether the model was in evaluation mode."""
    by_library: bool = False
    """Whether an installed library calls the model, such as a trainer."""
    collectives: tuple[str, ...] = ()
    """Kinds of collectives in the call, such as one that gathers features of other ranks."""
    num_bytes: int = 0
    """Bytes of these samples, of which there may be other numbers than of rows, such as of sequences by time."""
    weights: str = ""
    """Digest of the model's weights in its first call after a step, if that computes no gradients; else empty."""


@dataclass(frozen=True)
class Kept(Record):
    """Variables of the script after one of the first steps: digests by names, with lines if these are known."""

    averages: dict[str, str]
    """Tensors that the script updates as moving averages, such as the centre of a teacher's outputs."""
    generators: dict[str, str]
    """Generators of random numbers."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one weight in one step."""

    name: str
    local: Projections | None
    """Sum over the rank's backward passes; None if there was none, or if not all values are finite."""
    applied: Projections | None
    """Gradient that the optimizer has applied."""
    unclipped: Projections | None = None
    """Gradient that torch's functions were given to clip; None without a clipping."""
    is_set: bool = False
    """Whether the script has set the gradient itself, which it then sent: `local` is what it sent."""


@dataclass(frozen=True)
class Step(Record):
    """An optimizer has stepped."""

    number: int
    """Number of the step of this optimizer, from 1."""
    optimizer: int
    """Number of the optimizer, from 1, in the order of first steps."""
    loop: int
    kind: str
    """The optimizer's class."""
    is_wrapped: bool
    """Whether the optimizer is a wrapper that averages gradients."""
    learning_rates: tuple[float, ...]
    gradients: tuple[Gradient, ...]
    weights: dict[str, str]
    """Digests of the weights before the step; empty if none were taken."""
    state: dict[str, str]
    """Digests of the optimizer's slots before its first step; empty later."""
    loss: float | None
    """Sum of the losses of the backward passes whose gradients add up; None without any, or if it is not finite."""
    device: str
    line: str
    wrapper: str = ""
    """Line of the wrapper that averages the gradients of these weights; empty if there is none."""
    num_unwrapped: int = 0
    """Number of weights that no wrapper averages."""
    bypass: str = ""
    """How the wrapper of these weights was kept from averaging: `no_sync`, or `inner` if its model was called."""
    sharded: tuple[str, ...] = ()
    """Names of the weights of which each rank has a shard, and which are not compared."""
    closure_loss: float | None = None
    """First loss that the closure of a line search has returned."""
    num_passes: int = 1
    """Number of these backward passes."""
    after: dict[str, str] = field(default_factory=dict)
    """Digest of one of the weights after the step; empty if none was taken."""
    others: dict[str, str] = field(default_factory=dict)
    """Digests before the step of weights with gradients that no optimizer of this rank steps."""


@dataclass(frozen=True)
class Sent(Record):
    """A rank sends a gradient to be averaged."""

    name: str
    local: Projections | None
    """Sum over the rank's backward passes."""
    sent: Projections | None
    line: str


@dataclass(frozen=True)
class Collective(Record):
    """A collective has been called."""

    kind: str
    name: str
    shape: tuple[int, ...]
    line: str
    operation: str = ""
    """Operation of a reduction of Horovod: average, sum or adasum; in TensorFlow, only adasum is recorded."""
    callers: tuple[str, ...] = ()
    """All lines of the script that were being run, from the innermost to the outermost."""


@dataclass(frozen=True)
class EarlyChange(Record):
    """Gradients were changed or applied while Horovod still averaged them."""

    what: str
    """Change of the gradients: changed, clipped, unscaled, or APPLIED."""
    step: int
    line: str


@dataclass(frozen=True)
class Waiting(Record):
    """The rank may wait for others from now on."""

    what: str
    line: str
    computes: bool = False
    """Whether the rank also computes meanwhile."""
    thread: int = 0
    """Number of the thread that waits; 0 for the main thread."""


@dataclass(frozen=True)
class Resumed(Record):
    """The thread no longer waits."""

    thread: int = 0


@dataclass(frozen=True)
class Write(Record):
    """The script has opened a file for writing."""

    path: str
    line: str
    is_new: bool = False
    """Whether the file did not exist before; determined only in training on one rank."""
    aside: str | None = None
    """Path of a copy of the file's previous contents, if there were any; only in training on one rank."""
    callers: tuple[str, ...] = ()
    """All lines of the script that were being run, from the innermost to the outermost."""


@dataclass(frozen=True)
class Read(Record):
    """The script has opened a file for reading in a folder in which its rank has written."""

    path: str


@dataclass(frozen=True)
class HostCopy(Record):
    """Values were copied from a GPU, which makes the host wait."""

    step: int
    line: str


@dataclass(frozen=True)
class Unseen(Record):
    """Something could not be observed."""

    what: str
    reason: str


@dataclass(frozen=True)
class Ended(Record):
    """The process ends; this is its last record."""

    reason: str
    """`steps` if enough was observed, `script` if the script has ended by itself, else the error in one line."""
    line: str
