"""What an observed rank writes down: a frozen dataclass a kind of event, one JSON object a line, in order.

Digests are 64 bits in hexadecimal digits. A line of the script is written FILE:NUMBER.
"""

from __future__ import annotations

from dataclasses import dataclass

Projections = tuple[float, ...]
"""Products of a tensor's values, or of some of them, with fixed directions: linear, so that means can be compared."""


@dataclass(frozen=True)
class Started:
    """A process of the script has something to write down."""

    pid: int
    rank: int
    """By the environment that its launcher has made."""


@dataclass(frozen=True)
class World:
    """A library has been initialised."""

    library: str
    rank: int
    size: int
    line: str


@dataclass(frozen=True)
class Wrapped:
    """A wrapper that averages gradients has been made."""

    kind: str
    line: str
    operation: str = "average"
    """The reduction that was asked for: average, sum or adasum."""
    finds_unused: bool = False
    """DDP's find_unused_parameters."""


@dataclass(frozen=True)
class Sampler:
    """What decides which samples a loader reads."""

    kind: str
    shuffles: bool
    num_replicas: int | None = None
    """With rank, seed and epoch: of a DistributedSampler."""
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    reads_all: bool = False
    """Whether it draws every sample of the data set, once an epoch, for this rank alone."""


@dataclass(frozen=True)
class Loop:
    """The iteration over a loader, or an epoch of Keras' fit, begins."""

    number: int
    """From 1, in the order of their beginnings."""
    line: str
    num_batches: int | None
    """That it would have if it were not cut."""
    batch_size: int | None = None
    num_samples: int | None = None
    """Of the data set."""
    sampler: Sampler | None = None
    may_end_early: bool = False
    """Whether the script itself says how far an epoch goes: it leaves its loop, or gives fit a number of steps."""


@dataclass(frozen=True)
class Held:
    """What the training data of a rank hold in a few places, each of which has other contents."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """A loader has drawn the indices of a batch."""

    loop: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """The model has been called."""

    step: int
    """The step that comes next, from 1."""
    loop: int
    """The loop that began last; 0 before the first."""
    is_training: bool
    rows: tuple[str, ...]
    """Digest of each sample."""
    random_state: str | None
    """Digest of the random state before the call, if the call drew from it."""
    batch_norm: dict[str, str]
    """Digests of running statistics after it, in evaluation."""
    bypasses: str | None
    """The wrapper that holds this model, where the model was called without it."""
    line: str


@dataclass(frozen=True)
class Gradient:
    """Of one weight in one step."""

    name: str
    local: Projections | None
    """The sum over the rank's backward passes; None where it had none, or not all values are finite."""
    applied: Projections | None
    """What the optimizer has used."""


@dataclass(frozen=True)
class Step:
    """An optimizer has stepped."""

    number: int
    """From 1, of this optimizer."""
    optimizer: int
    """From 1, in the order of their first steps."""
    loop: int
    kind: str
    """The optimizer's class."""
    is_wrapped: bool
    """Whether it is a wrapper that averages gradients."""
    learning_rates: tuple[float, ...]
    gradients: tuple[Gradient, ...]
    weights: dict[str, str]
    """Digests before the step; empty where none were taken."""
    state: dict[str, str]
    """Digests of the optimizer's slots before the step, beside the first weights."""
    loss: float | None
    """Of the last backward pass; None without one, or where it is not finite."""
    device: str
    line: str


@dataclass(frozen=True)
class Collective:
    """A collective has been asked for."""

    kind: str
    name: str
    shape: tuple[int, ...]
    line: str
    operation: str = ""
    """Of Horovod's reductions: average, sum or adasum; in TensorFlow the last alone."""


@dataclass(frozen=True)
class EarlyClip:
    """Gradients were clipped, or unscaled, while Horovod still averaged them."""

    what: str
    """As which: clipped, unscaled."""
    step: int
    line: str


@dataclass(frozen=True)
class Waiting:
    """The rank may wait for others from now on."""

    what: str
    line: str
    computes: bool = False
    """Whether it computes meanwhile as well."""


@dataclass(frozen=True)
class Resumed:
    """It no longer does."""


@dataclass(frozen=True)
class Write:
    """The script has opened a file to write."""

    path: str
    line: str
    is_new: bool = False
    """Whether there was nothing of this name; looked at in training, on one rank."""
    aside: str | None = None
    """Where a copy of what it held is kept, if it was a file; in training, on one rank."""


@dataclass(frozen=True)
class HostCopy:
    """Values were copied from a GPU, for which the host waits."""

    step: int
    line: str


@dataclass(frozen=True)
class Ended:
    """The process ends; last of all."""

    reason: str
    """steps: we have seen enough; script: it has ended by itself; else the error in one line."""
    line: str


Record = (
    Started
    | World
    | Wrapped
    | Loop
    | Held
    | Batch
    | Forward
    | Step
    | Collective
    | EarlyClip
    | Waiting
    | Resumed
    | Write
    | HostCopy
    | Ended
)
