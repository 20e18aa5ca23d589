"""Base class of the strategies of both frameworks: the five steps by which ranks are formed and wired.

`HorovodRanks` has what Horovod's strategies share: how the ranks are formed, their devices and collectives.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.cli.strategy_flags import check_horovod, configure_horovod
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.devices import check_agreement, choose_gpu, report_choice
from allstep.common.launch.placement import Placement
from allstep.common.launch.versions import usable_gpus
from allstep.common.training.elastic import form_anew


class BaseStrategy(ABC):
    """The five steps, in the order in which `train.py` takes them.

    Models, optimizers, devices and reductions are the framework's; its `Strategy` documents them.
    """

    gpu: int | None = None
    """Number of this rank's GPU among those that it sees, None for the CPU; chosen in `init`."""
    collectives: Collectives
    """Collectives of the engine; set by `pin_device`."""
    num_local_devices = 1
    """Number of devices among which this process divides its samples; set by `pin_device`."""
    steps_in_flight = 1
    """Steps that may be under way before the engine looks at the loss of the first."""
    reduction: Any
    """How gradients are combined; set by `wrap`."""
    ordered_sum_of: Callable[..., Any]
    """Makes an `OrderedSum` of the number of slices, rank, world size and exchange."""
    synchronise_batch_norm: Callable[..., None]
    """Makes batch norms of a model normalise over all ranks; takes the model, `sum_over_ranks`, and `wanted`."""

    def __init__(self, placement: Placement, flags: StrategyConfig, *, device: str = "auto") -> None:
        """`device`: auto, cpu or cuda."""
        self.placement: Placement = placement
        self.flags: StrategyConfig = flags
        self._wanted_device = device

    @abstractmethod
    def init(self) -> None:
        """1. Learn rank and world size."""

    @abstractmethod
    def pin_device(self) -> Any:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""

    def choose_device(self) -> None:
        """Choose a GPU or the CPU, on which the communication depends; `init` calls it once it knows the placement."""
        num_gpus = self.count_gpus()
        self.gpu = choose_gpu(self._wanted_device, self.placement, num_gpus)
        report_choice(self.gpu, self._wanted_device, self.placement, num_gpus)

    @abstractmethod
    def count_gpus(self) -> int:
        """Return the number of GPUs that this rank sees and could train on."""

    def serve(self) -> bool:
        """Compute for another rank until it ends, if this rank does not train itself; return whether that was so."""
        return False

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and the optimizer are made, by default on this rank's device."""
        return contextlib.nullcontext()

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """3. Have gradients averaged over ranks before they are applied; only this step depends on --slices.

        Returns: what to call in a training step in place of `model`, and the optimizer.
        """
        self.synchronise_batch_norm(model, self.sum_over_ranks, wanted=self.flags.sync_batch_norm)
        reduce = self.reduce_in_order if self.flags.slices else self.reduce
        self.reduction = reduce(model, optimizer)
        return self.reduction.model, self.reduction.optimizer

    @abstractmethod
    def reduce(self, model: Any, optimizer: Any) -> Any:
        """Have the strategy's library combine gradients; return the `Reduction`."""

    @abstractmethod
    def reduce_in_order(self, model: Any, optimizer: Any) -> Any:
        """Have gradients combined in one fixed order (--slices); return the `Ordered`."""

    @abstractmethod
    def broadcast(self, model: Any, optimizer: Any) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    def ordered_sum(self) -> Any:
        """Return the `OrderedSum` that adds up vectors of slices over all ranks."""
        return self.ordered_sum_of(
            self.flags.num_slices, self.placement.rank, self.placement.world_size, exchange=self._exchange()
        )

    def _exchange(self) -> Any:
        """Return the exchange of tensors between ranks; None for one rank."""
        return None

    def sum_over_ranks(self, tensor: Any, name: str) -> Any:
        """Return the sum of `tensor` over all ranks and devices, in place if the framework's tensors can change.

        `name` is the same on all ranks, and belongs to no other sum.
        """
        return tensor

    def metrics(self) -> dict[str, float]:
        """Return measurements of the strategy for the report of the run."""
        return {}

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that communicate."""
        return {}


class HorovodRanks(BaseStrategy):
    """The first two steps in Horovod; stands before the framework's `Strategy` among the bases of a strategy."""

    hvd: ClassVar[Any]
    """`horovod.torch`, or the drop-in for Keras."""
    init_options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of its `init`."""
    notifications: ClassVar[Any]
    """Horovod's manager of notifications."""
    version: ClassVar[str]
    """Horovod's."""
    collectives_of: ClassVar[type]
    """Collectives of a rank and a world size."""
    exchange_of: ClassVar[type]
    """See `ordered_sum.Exchange`."""

    def init(self) -> None:
        """1. Learn rank and world size."""
        self.choose_device()
        configure_horovod(self.placement, self.flags, on_gpu=self.gpu is not None)
        if self.flags.elastic:
            self.placement = form_anew(self.hvd, self.notifications, self.placement)
        else:
            self.hvd.init(**self.init_options)
        rank, size = self.hvd.rank(), self.hvd.size()
        check_horovod(self.placement, self.flags.op, size=size, mpi_enabled=self.hvd.mpi_enabled())
        self.collectives = self.collectives_of(rank, size)

    def count_gpus(self) -> int:
        """Return the number of GPUs that this rank sees and Horovod can use."""
        return usable_gpus(super().count_gpus(), self._wanted_device, self.placement)

    def pin_device(self) -> Any:
        """2. Take one device, as all ranks do or none."""
        device = super().pin_device()
        check_agreement(
            int(self.collectives.all_gather(np.array([self.gpu is not None], np.int64)).sum()), self.placement
        )
        return device

    def _exchange(self) -> Any:
        # MPI and Gloo choose an order by size; NCCL may measure first.
        return self.exchange_of(keeps_order=self.gpu is None) if self.hvd.size() > 1 else None

    def versions(self) -> dict[str, str]:
        """Return the version of Horovod."""
        return {"horovod": self.version}
