"""Base class of strategies: how ranks are formed and how gradients are combined; and that of one process.

PyTorch's has the same methods.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.base.resources import keep_freed_memory, usable_cores
from allstep.common.data.loader import Batch
from allstep.common.launch.placement import Placement, threads_per_rank
from allstep.common.training.strategy import BaseStrategy
from allstep.common.training.worker import StepResult
from allstep.tensorflow.inputs import Samples
from allstep.tensorflow.passes import Gradients
from allstep.tensorflow.strategies.batch_norm import brought_synchronised, synchronise_batch_norm
from allstep.tensorflow.strategies.ordered_sum import Numbers, OrderedSum, SliceDevices
from allstep.tensorflow.strategies.reduction import Ordered, Reduction

Result = TypeVar("Result")
Compute = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Numbers]
"""`Step.compute`: takes inputs, targets, the weight of their losses and the loss scale."""
EvalPass = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Takes inputs, targets and a weight, 0 for padding; returns the sum of losses, and the outputs except of padding."""
Start = Callable[[Batch, float, float], StepResult]
"""Takes this rank's batch, the learning rate and the loss scale; starts the step."""


@contextlib.contextmanager
def before_tensorflow_starts() -> Iterator[None]:
    """Turn the error of a setting that comes after TensorFlow's start into advice for the user's program."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            "expected TensorFlow to start after this rank has taken its device and its cores, received one "
            "that has started; import Session first, and give it a function that builds the model"
        ) from error


def share_cores(placement: Placement, *, slices: int | None = None, num_devices: int = 1) -> None:
    """Give TensorFlow this rank's share of the host's cores.

    Raises UserError if it has started with another share, unless this rank is alone on the host and no bits depend on
    the number of threads.
    """
    threads = threads_per_rank(placement, slices=slices)
    is_needed = placement.local_size > 1 or slices or num_devices > 1
    with before_tensorflow_starts() if is_needed else contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # By default independent operations use all cores of the host, including those of other ranks.
        num_threads = min(threads * num_devices, usable_cores())
        tf.config.threading.set_inter_op_parallelism_threads(num_threads)


class Strategy(BaseStrategy):
    """Base class of TensorFlow's strategies, with what the worker asks of them."""

    reduction: Reduction
    slice_devices: SliceDevices = SliceDevices()
    """Devices on which this process computes its slices with --slices; available from `wrap` on."""
    rank_weight = 1.0
    """Factor of a batch's loss weight: 1 where gradients are averaged over ranks, 1 / world_size where added up."""
    asks_in_loops = True
    """Whether ranks can ask each other within a loop of TensorFlow, as that over --accumulate-steps."""
    ordered_sum_of = OrderedSum
    synchronise_batch_norm = staticmethod(synchronise_batch_norm)

    def pin_device(self) -> str:
        self._share_host()
        if self.gpu is None:
            return "/CPU:0"
        gpu = tf.config.list_physical_devices("GPU")[self.gpu]
        with before_tensorflow_starts():
            tf.config.experimental.set_memory_growth(gpu, True)
            tf.config.set_visible_devices(gpu, "GPU")
        return "/GPU:0"  # the only visible one

    def choose_device(self) -> None:
        super().choose_device()
        if self.gpu is None:
            with before_tensorflow_starts():
                tf.config.set_visible_devices([], "GPU")

    def count_gpus(self) -> int:
        return len(tf.config.list_physical_devices("GPU"))

    def _share_host(self, *, num_devices: int = 1) -> None:
        keep_freed_memory()
        share_cores(self.placement, slices=self.flags.slices, num_devices=num_devices)

    def compiled(self, function: Callable) -> Callable:
        """Return `function` of tensors, under --compile as one XLA program for each of their shapes."""
        return tf.function(function, jit_compile=True, autograph=False) if self.flags.compile else function

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        flags, asks_others = self.flags, type(self).sum_over_ranks is not Strategy.sum_over_ranks
        refused = "--slices" if flags.slices else "--compile" if flags.compile and asks_others else ""
        if flags.accumulate_steps > 1 and not self.asks_in_loops:
            refused = refused or "--accumulate-steps"
        if refused and (name := brought_synchronised(model)):
            raise UserError(
                f"expected a network without BatchNormalization(synchronized=True) for {refused}, received {name}; "
                f"leave synchronized or {refused} out"
            )
        return super().wrap(model, optimizer)

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        return Reduction(model, optimizer, self.compiled)

    def reduce_in_order(self, model: keras.Model, optimizer: keras.Optimizer) -> Ordered:
        return Ordered(model, optimizer)

    def compile_train_step(
        self, compute: Compute, set_learning_rate: Callable[[tf.Tensor], None], samples: Samples
    ) -> Start:
        """Return a function that runs a step on all devices of this process, each with its part of the batch.

        It calls `set_learning_rate` before the step.
        """

        def traced(
            inputs: tf.Tensor,
            targets: tf.Tensor,
            loss_weight: tf.Tensor,
            learning_rate: tf.Tensor,
            loss_scale: tf.Tensor,
        ) -> Numbers:
            set_learning_rate(learning_rate)
            return self._on_devices(compute, inputs, targets, loss_weight, loss_scale)

        compiled = compile_step(traced, samples, num_numbers=3)

        def start(batch: Batch, learning_rate: float, loss_scale: float) -> StepResult:
            numbers = batch.loss_weight * self.rank_weight, learning_rate, loss_scale
            results = compiled(batch.inputs, batch.targets, *map(cached_constant, numbers))
            return StepResult(**{name: read_later(number) for name, number in results.items()})

        return start

    def compile_eval_step(
        self, step: EvalPass, samples: Samples
    ) -> Callable[[np.ndarray, np.ndarray], tuple[tf.Tensor, tf.Tensor]]:
        """Return `step` as a function that runs on all devices of this process, each with its part of the batch."""

        def traced(inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._on_devices(step, inputs, targets, tf.constant(1.0))

        return compile_step(traced, samples)

    def unless(self, overflow: tf.Tensor, update: Callable[[Gradients], None], gradients: Gradients) -> None:
        """Call `update` with `gradients` unless there is an overflow. Called in a compiled step."""
        apply_if(overflow, lambda: update(gradients))

    def _on_devices(
        self,
        step: Callable[..., Result],
        inputs: tf.Tensor,
        targets: tf.Tensor,
        loss_weight: tf.Tensor,
        *numbers: tf.Tensor,
    ) -> Result:
        """Run `step` on the devices of this process; return the sums of their numbers, and their arrays concatenated.

        Called in a compiled step.
        """
        return step(inputs, targets, loss_weight, *numbers)

    # What each rank holds of the state.

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """Return the whole variable on each device of this process."""
        return [variable.value]

    def replicas(self, variable: keras.Variable) -> Sequence[np.ndarray]:
        """Return `copies` as arrays."""
        return [copy.numpy() for copy in self.copies(variable)]

    def shard(self, array: np.ndarray, like: keras.Variable) -> np.ndarray:
        """Return the part of `array` that this rank holds, sharded like `like`."""
        return array

    def gather(self, variables: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
        """Return the whole state, of which this rank holds `variables`. All ranks call it."""
        return {name: variable.value.numpy() for name, variable in variables.items()}


def compile_step(function: Callable, samples: Samples, *, num_numbers: int = 0) -> Callable:
    """Return `function` of inputs, targets and `num_numbers` numbers as one TensorFlow function.

    The number of samples is open, so that a smaller last batch does not compile the step again. AutoGraph is off,
    because it would take longer than all the rest.
    """
    numbers = [tf.TensorSpec((), tf.float32)] * num_numbers
    return tf.function(function, input_signature=(*samples, *numbers), autograph=False)


# Few numbers change between steps, and copying one to a GPU waits for everything that was started there.
cached_constant = functools.lru_cache(maxsize=8)(lambda number: tf.constant(number, tf.float32))
_COPIES = ThreadPoolExecutor(1)


def read_later(number: tf.Tensor) -> Any:
    """Return a number of a started step; if a GPU computes it, an object that waits when it is converted."""
    return PendingNumber(number) if "GPU" in number.device else number


class PendingNumber:
    """Number that a GPU computes, copied by a separate thread: `float()` does not wait for steps started later.

    TensorFlow itself would copy it on access, behind everything that was started by then.
    """

    def __init__(self, number: tf.Tensor) -> None:
        self._copy = _COPIES.submit(number.numpy)

    def __float__(self) -> float:
        return float(self._copy.result())

    def __int__(self) -> int:
        return int(self._copy.result())


def apply_if(overflow: tf.Tensor, apply: Callable[[], None]) -> None:
    """Call `apply` in a compiled step unless there is an overflow."""

    def branch() -> tf.Tensor:
        apply()
        return tf.constant(0)

    tf.cond(overflow > 0, lambda: tf.constant(0), branch)


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. Nothing to do: there are no other ranks."""
