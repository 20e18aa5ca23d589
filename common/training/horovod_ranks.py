"""Parts that Horovod's strategies of both frameworks share: how the ranks are formed, their devices and collectives."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from allstep.common.cli.strategy_flags import check_horovod, configure_horovod
from allstep.common.launch.devices import check_agreement
from allstep.common.launch.versions import usable_gpus
from allstep.common.training.elastic import form_anew

if TYPE_CHECKING:
    from allstep.common.base.collectives import Collectives
    from allstep.common.config.train_config import StrategyConfig
    from allstep.common.launch.placement import Placement


class HorovodRanks:
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

    if TYPE_CHECKING:
        placement: Placement
        flags: StrategyConfig
        gpu: int | None
        collectives: Collectives
        _wanted_device: str

        def choose_device(self) -> None: ...

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
        return usable_gpus(super().count_gpus(), self._wanted_device, self.placement)  # pyright: ignore[reportAttributeAccessIssue]

    def pin_device(self) -> Any:
        """2. Take one device, as all ranks do or none."""
        device = super().pin_device()  # pyright: ignore[reportAttributeAccessIssue]
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
