"""ParameterServerStrategy: asynchronous; each worker reads the weights, computes a gradient and applies it at once.

    horovodrun -np 3 python tensorflow/train.py --strategy parameter-server

Rank 0 is the chief: it runs the engine, passes batches to the workers through a ClusterCoordinator, validates, and
keeps the parameters in its own server. All other ranks are workers, which serve until the chief is gone. A step is one
update by one worker, so the samples of a "global" batch are those of one update. The user's TF_CONFIG may place the
parameters on separate processes, in the role `ps`.

The staleness of a gradient is the number of updates by others between reading the weights and applying it; the run
reports mean and maximum.

A notice to end (SIGTERM, SIGUSR1) has to reach the chief, as it does if the launcher passes it to all ranks; a worker
ignores it. A frozen process counts as gone after two thirds of --fault-timeout. Where a host is cut off, rank 0 may
take twice that timeout, and be ended by its watcher.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.base.resources import usable_cores
from allstep.common.config.train_config import FaultConfig, StrategyConfig
from allstep.common.data.loader import Batch
from allstep.common.launch import rendezvous, tf_config
from allstep.common.launch.placement import Placement, threads_per_rank
from allstep.common.launch.tf_config import TFConfig
from allstep.common.process.exit import EXIT_FAULT, leave, rank_name, seconds_to_turn
from allstep.common.process.suspend_watchdog import end_when_frozen
from allstep.common.watch import NOTICES
from allstep.tensorflow.inputs import Samples
from allstep.tensorflow.passes import Gradients
from allstep.tensorflow.strategies.distribute import DistributedStrategy
from allstep.tensorflow.strategies.reduction import Reduction, ReplicaSums
from allstep.tensorflow.strategies.strategy import Compute, EvalPass, compile_step

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_NUM_FAILURES = 2  # in a row, before a process counts as gone
# Share of --fault-timeout for one answer; the launcher needs the rest to end the job.
_ANSWER_SHARE = 1 / 3


class ParameterServer(DistributedStrategy):
    """The five steps in tf.distribute.ParameterServerStrategy; only the chief goes beyond the second."""

    name = "parameter-server"
    _has_begun = False

    def __init__(
        self,
        placement: Placement,
        flags: StrategyConfig,
        *,
        device: str = "auto",
        fault_timeout: float = FaultConfig.fault_timeout,
    ) -> None:
        """`fault_timeout`: seconds from the moment a process stops answering to the end of the job."""
        super().__init__(placement, flags, device=device)
        self._fault_timeout, self._answer_seconds = fault_timeout, fault_timeout * _ANSWER_SHARE
        self._staleness = Staleness()
        self._servers: list[tf.distribute.Server] = []

    def init(self) -> None:
        if self._has_begun:
            raise UserError(
                "expected one Session with parameter-server in a process, whose servers stay, received a second; start "
                "another job for it"
            )
        given = os.environ.get("TF_CONFIG")
        if given:
            self.placement = tf_config.find_placement(tf_config.parse(given, self.name), self.placement)
        self.choose_device()
        self._cluster = tf_config.parse(given, self.name) if given else self._agree()
        self.collectives = OneRank()  # the chief alone goes through the data
        self.steps_in_flight = 2 * len(self._cluster.cluster["worker"])
        ParameterServer._has_begun = True

    def _agree(self) -> TFConfig:
        with rendezvous.free_ports(2) as ports:
            host = rendezvous.local_host(self.placement)
            texts = rendezvous.all_gather(" ".join(f"{host}:{port}" for port in ports), self.placement)
        first, server = zip(*(text.split() for text in texts), strict=True)
        config = tf_config.parameter_server_config(first, server[0], self.placement.rank)
        if config.role == "chief":
            self._start_server(config, "ps", 0)
        return config

    def pin_device(self) -> str:
        device = super().pin_device()
        if self._cluster.role == "chief":
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(self._cluster.cluster), task_type="chief", task_id=0, rpc_layer="grpc"
            )
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
            # TensorFlow logs pages about a worker that it has lost; `_watch` says it in a line.
            tf.get_logger().setLevel("CRITICAL")
            for member in self._cluster.members:
                if member[0] == "worker" or (member[0] == "ps" and not self._servers):
                    threading.Thread(target=self._watch, args=member, daemon=True).start()
        return device

    def serve(self) -> bool:
        is_chief = self._cluster.role == "chief"
        # TensorFlow may wait for a process with Python's lock: no thread of the chief can then report that one. If it
        # is a frozen one, its own watcher ends it in time for the chief's report.
        waits = ", or a host that it waits for," if is_chief else ""
        end_when_frozen(self._fault_timeout * (2 if is_chief else 1), f"{rank_name(self.placement)}{waits}")
        if is_chief:
            return False
        self._start_server(self._cluster, self._cluster.role, self._cluster.index)
        # A notice to end concerns the chief, which needs this process until it has saved.
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)
        [chief] = self._cluster.cluster["chief"]
        while _failure(chief, self._answer_seconds):
            time.sleep(_LOOK_SECONDS)
        if _wait_until_gone(chief, self._answer_seconds) == _FROZEN:
            message = f"allstep: {rank_name(self.placement)} stopped: rank 0 (chief at {chief}) {_FROZEN}"
            time.sleep(seconds_to_turn(self.placement.rank - 1))
            leave(EXIT_FAULT, message if self.placement.rank == 1 else "")
        return True

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        self._num_updates = cast("keras.Variable", optimizer.iterations)
        return _OwnGradients(model, optimizer)

    def compile_train_step(
        self, compute: Compute, set_learning_rate: Callable[[tf.Tensor], None], samples: Samples
    ) -> Callable[[Batch, float, float], Update]:
        """Return a function that passes the batch to a worker, and returns at once."""

        def traced(
            inputs: tf.Tensor,
            targets: tf.Tensor,
            loss_weight: tf.Tensor,
            learning_rate: tf.Tensor,
            loss_scale: tf.Tensor,
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            set_learning_rate(learning_rate)
            before = tf.identity(self._num_updates.value)
            with tf.control_dependencies([before]):
                numbers: Any = self._on_devices(compute, inputs, targets, loss_weight, loss_scale)
            overflow = numbers["overflow"]
            local_updates = tf.where(overflow > 0, 0, 1)
            with tf.control_dependencies([overflow]):
                missed = self._num_updates.value - before
            return numbers["loss_sum"], overflow, missed - tf.cast(local_updates, missed.dtype)

        compiled = compile_step(traced, samples, num_numbers=3)

        def start(batch: Batch, learning_rate: float, loss_scale: float) -> Update:
            numbers = map(np.float32, (batch.loss_weight, learning_rate, loss_scale))
            return Update(
                self._coordinator.schedule(compiled, (batch.inputs, batch.targets, *numbers)), self._staleness
            )

        return start

    def compile_eval_step(
        self, step: EvalPass, samples: Samples
    ) -> Callable[[np.ndarray, np.ndarray], tuple[tf.Tensor, tf.Tensor]]:
        """Return `step` as a function that runs on the chief, when all updates are complete."""
        return compile_step(lambda inputs, targets: step(inputs, targets, tf.constant(1.0)), samples)

    def metrics(self) -> dict[str, float]:
        return {"staleness_mean": self._staleness.mean, "staleness_max": self._staleness.max}

    def _start_server(self, config: TFConfig, role: str, index: int) -> None:
        options = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads_per_rank(self.placement))
        # The default is the number of cores of this process: on one core, servers would wait for each other for ever.
        num_workers = len(config.cluster["worker"])
        options.inter_op_parallelism_threads = max(usable_cores(), num_workers + 1)
        if role == "ps" or self.gpu is None:
            options.device_count["GPU"] = 0
        self._servers.append(
            tf.distribute.Server(config.cluster, job_name=role, task_index=index, protocol="grpc", config=options)
        )

    def _watch(self, role: str, index: int, address: str) -> None:
        """End the run when a process that serves is gone: TensorFlow would wait for it to come back."""
        failure = _wait_until_gone(address, self._answer_seconds)
        world_size, num_workers = self.placement.world_size, len(self._cluster.cluster["worker"])
        rank = index + (1 if role == "ps" else world_size - num_workers)
        leave(
            EXIT_FAULT,
            f"allstep: {rank_name(self.placement)} stopped: rank {rank} ({role} {index} at {address}) {failure}",
        )


class _OwnGradients(ReplicaSums):
    """Each worker applies its own gradients."""

    def updates(self, update: Callable[[Gradients], None]) -> Callable[[Gradients], None]:
        def update_after(gradients: Gradients) -> None:
            # The optimizer must count an update when it is applied, not while its gradients are computed.
            with tf.control_dependencies([one for one in gradients if one is not None]):
                update(gradients)

        return update_after


@dataclass
class Staleness:
    """Number of updates by others that gradients have missed, over all updates so far."""

    num_updates: int = 0
    sum: int = 0
    max: int = 0

    @property
    def mean(self) -> float:
        return self.sum / self.num_updates if self.num_updates else 0.0

    def add(self, staleness: int) -> None:
        self.num_updates += 1
        self.sum += staleness
        self.max = max(self.max, staleness)


class Update:
    """Update that a worker computes, with the fields of a `common.training.worker.StepResult`."""

    def __init__(self, result: tf.distribute.coordinator.RemoteValue, staleness: Staleness) -> None:
        self._result, self._staleness = result, staleness

    def __float__(self) -> float:
        loss_sum, overflow, staleness = self._result.fetch()
        if not overflow:
            self._staleness.add(int(staleness))
        return float(loss_sum)

    @property
    def overflow(self) -> int:
        return int(self._result.fetch()[1])


_GONE = "is gone; it was killed, or its host cannot be reached"
_FROZEN = "does not answer; it is frozen"


def _wait_until_gone(address: str, seconds: float) -> str:
    """Return when the server at host:port has not answered within `seconds` twice: _GONE or _FROZEN."""
    num_failures = 0
    while num_failures < _NUM_FAILURES:
        time.sleep(_LOOK_SECONDS)
        failure = _failure(address, seconds)
        num_failures = num_failures + 1 if failure else 0
    return failure


def _failure(address: str, seconds: float) -> str:
    """Describe the failure of the server at host:port; empty if it answers within `seconds`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=min(_CONNECT_SECONDS, seconds)) as connection:
            connection.settimeout(seconds)
            try:
                # The kernel connects for a frozen process, too. A server of gRPC speaks first (RFC 9113, section 3.4).
                return "" if connection.recv(1) else _GONE
            except TimeoutError:
                return _FROZEN
    except OSError:
        return _GONE
