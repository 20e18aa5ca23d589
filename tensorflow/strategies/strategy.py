"""What a strategy is: how the ranks are formed and how gradients meet. PyTorch's has the same methods."""

from __future__ import annotations

import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.base.memory import keep_freed_memory
from allstep.common.config.train_config import StrategyConfig
from allstep.common.data.loader import Batch
from allstep.common.launch.devices import choose_gpu, report_choice
from allstep.common.launch.placement import Placement, threads_per_rank
from allstep.common.training.worker import StepResult
from allstep.tensorflow.inputs import Samples
from allstep.tensorflow.passes import Gradients
from allstep.tensorflow.strategies.batch_norm import synchronise_batch_norm
from allstep.tensorflow.strategies.ordered_sum import Exchange, OrderedSum
from allstep.tensorflow.strategies.reduction import Ordered, Reduction
from allstep.tensorflow.strategies.slice_devices import OneDevice, SliceDevices

Result = TypeVar("Result")
Numbers = dict[str, tf.Tensor]
"""Fields of a `StepResult`, added up over the devices of this process."""
Compute = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Numbers]
"""`Step.compute`: takes inputs, targets, the weight of their losses and the loss scale."""
EvalPass = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""Inputs, targets and a weight of 0 where they do not count -> the sums of losses and of the metric."""
Start = Callable[[Batch, float, float], StepResult]
"""Takes this rank's batch, the learning rate and the loss scale; starts the step."""


@contextlib.contextmanager
def before_tensorflow_starts() -> Iterator[None]:
    """What TensorFlow refuses once it has started, in words for the program that has started it.

    Raises:
        UserError: it has started.
    """
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            "expected TensorFlow to start after this rank has taken its device and its cores, received one "
            "that has started; import Session first, and give it a function that builds the model"
        ) from error


def share_cores(placement: Placement, *, slices: int | None = None, num_devices: int = 1) -> None:
    """Give TensorFlow this rank's share of the host's cores.

    Raises:
        UserError: it has started with another one.
    """
    threads = threads_per_rank(placement, slices=slices)
    with before_tensorflow_starts():
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # By default operations that need not wait for each other take all cores of the host, those of other ranks too.
        num_threads = min(threads * num_devices, len(os.sched_getaffinity(0)))
        tf.config.threading.set_inter_op_parallelism_threads(num_threads)


class Strategy(ABC):
    """The five steps, in the order in which `train.py` takes them, and what the worker asks on the way."""

    gpu: int | None = None
    """Number of this rank's GPU among those that it sees, None for the CPU; chosen in `init`."""
    collectives: Collectives
    """What the engine says to the other ranks; there from `pin_device` on."""
    steps_in_flight = 1
    """Steps that may be under way before the engine looks at the loss of the first."""
    slice_devices: SliceDevices = OneDevice()
    """Where this process computes its slices with --slices; there from `wrap` on."""
    reduction: Reduction
    """How gradients are combined; there from `wrap` on."""
    num_local_devices = 1
    """Devices of this process that compute a part of its samples each; there from `pin_device` on."""
    rank_weight = 1.0
    """Factor of a batch's loss weight: 1 where gradients are averaged over ranks, 1 / world_size where added up."""

    def __init__(self, placement: Placement, flags: StrategyConfig, *, device: str = "auto") -> None:
        """`device`: auto, cpu or cuda."""
        self.placement, self.flags, self._wanted_device = placement, flags, device

    @abstractmethod
    def init(self) -> None:
        """1. Learn who the others are."""

    def pin_device(self) -> str:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        self._share_host()
        if self.gpu is None:
            return "/CPU:0"
        gpu = tf.config.list_physical_devices("GPU")[self.gpu]
        with before_tensorflow_starts():
            tf.config.experimental.set_memory_growth(gpu, True)
            tf.config.set_visible_devices(gpu, "GPU")
        return "/GPU:0"  # the only visible one

    def choose_device(self) -> None:
        """Choose a GPU or the CPU: how ranks communicate depends on it. `init` calls it once it knows its place."""
        num_gpus = self.count_gpus()
        self.gpu = choose_gpu(self._wanted_device, self.placement, num_gpus)
        report_choice(self.gpu, self._wanted_device, self.placement, num_gpus)
        if self.gpu is None:
            tf.config.set_visible_devices([], "GPU")

    def count_gpus(self) -> int:
        """GPUs that this rank sees and could train on."""
        return len(tf.config.list_physical_devices("GPU"))

    def serve(self) -> bool:
        """Whether this rank only computes for another one that trains; returns when that one is gone."""
        return False

    def _share_host(self, *, num_devices: int = 1) -> None:
        keep_freed_memory()
        share_cores(self.placement, slices=self.flags.slices, num_devices=num_devices)

    def scope(self) -> contextlib.AbstractContextManager:
        """The model and the optimizer are made inside it."""
        return contextlib.nullcontext()

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied; the only place that looks at --slices."""
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(model, self.sum_over_ranks)
        reduce = self.reduce_in_order if self.flags.slices else self.reduce
        self.reduction = reduce(model, optimizer)
        return model, self.reduction.optimizer

    @abstractmethod
    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    def compiled(self, function: Callable) -> Callable:
        """`function` of tensors, of which XLA makes a program for each of their shapes; as it is without --compile."""
        return tf.function(function, jit_compile=True, autograph=False) if self.flags.compile else function

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        """Have the strategy's library combine gradients."""
        return Reduction(optimizer, model.trainable_variables, self.compiled)

    def reduce_in_order(self, model: keras.Model, optimizer: keras.Optimizer) -> Ordered:
        """With --slices: have gradients combined in one fixed order."""
        return Ordered(optimizer, model.trainable_variables)

    def ordered_sum(self) -> OrderedSum:
        """Return what adds up vectors of slices over all ranks."""
        assert self.flags.num_slices is not None
        return OrderedSum(self.flags.num_slices, self.placement.rank, self.placement.world_size, self._exchange())

    def _exchange(self) -> Exchange | None:
        """Return how tensors travel between ranks, where there are several."""
        return None

    # What the worker asks.

    def sum_over_ranks(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum of `tensor` over all ranks and devices; the name is the same on all and no other sum's."""
        return tensor

    def compile_train_step(
        self, compute: Compute, set_learning_rate: Callable[[tf.Tensor], None], samples: Samples
    ) -> Start:
        """Have a step run on every device of this process, each with its part of the batch.

        Args:
            set_learning_rate: called before each step.
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
        """Have `step` run on every device of this process, each with its part of the batch."""

        def traced(inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._on_devices(step, inputs, targets, tf.constant(1.0))

        return compile_step(traced, samples)

    def unless(self, overflow: tf.Tensor, update: Callable[[Gradients], None], gradients: Gradients) -> None:
        """Call `update` with `gradients` unless there is an overflow; else nothing changes. Called in a step."""
        apply_if(overflow, lambda: update(gradients))

    def _on_devices(
        self,
        step: Callable[..., Result],
        inputs: tf.Tensor,
        targets: tf.Tensor,
        loss_weight: tf.Tensor,
        *numbers: tf.Tensor,
    ) -> Result:
        """The sum of what the devices of this process return; called inside a compiled step."""
        return step(inputs, targets, loss_weight, *numbers)

    # What each rank holds of the state.

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """The whole of a variable on each device of this process."""
        return [variable.value]

    def replicas(self, variable: keras.Variable) -> Sequence[np.ndarray]:
        """The same as arrays."""
        return [copy.numpy() for copy in self.copies(variable)]

    def shard(self, array: np.ndarray, like: keras.Variable) -> np.ndarray:
        """What this rank holds of `array`, as it holds `like`."""
        return array

    def gather(self, variables: Mapping[str, keras.Variable]) -> dict[str, np.ndarray]:
        """The whole state, of which this rank holds `variables`. All ranks call it."""
        return {name: variable.value.numpy() for name, variable in variables.items()}

    # What is reported.

    def metrics(self) -> dict[str, float]:
        """What the strategy measures besides, for the report of the run."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that communicate."""
        return {}


def compile_step(function: Callable, samples: Samples, *, num_numbers: int = 0) -> Callable:
    """`function` of inputs, targets and so many numbers as one TensorFlow function.

    The number of samples is left open, so that a smaller last batch does not compile the step anew. AutoGraph would
    rewrite Python's control flow, of which there is none on tensors, and takes longer than all the rest.
    """
    numbers = [tf.TensorSpec((), tf.float32)] * num_numbers
    return tf.function(function, input_signature=(*samples, *numbers), autograph=False)


# Few change from step to step, and to copy one to a GPU waits for all that was started there.
cached_constant = functools.lru_cache(maxsize=8)(lambda number: tf.constant(number, tf.float32))
_COPIES = ThreadPoolExecutor(1)


def read_later(number: tf.Tensor) -> Any:
    """A number of a step that was started."""
    return PendingNumber(number) if "GPU" in number.device else number


class PendingNumber:
    """A number that a GPU computes, copied by a thread of its own: `float()` waits for no step that was started since.

    TensorFlow would copy it when it is looked at, behind all that was started by then.
    """

    def __init__(self, number: tf.Tensor) -> None:
        self._copy = _COPIES.submit(number.numpy)

    def __float__(self) -> float:
        return float(self._copy.result())

    def __int__(self) -> int:
        return int(self._copy.result())


def apply_if(overflow: tf.Tensor, apply: Callable[[], None]) -> None:
    """Call `apply` where there is no overflow; else nothing changes."""

    def branch() -> tf.Tensor:
        apply()
        return tf.constant(0)

    tf.cond(overflow > 0, lambda: tf.constant(0), branch)
