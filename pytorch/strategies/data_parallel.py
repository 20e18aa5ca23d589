"""DataParallel: one process, several GPUs; each step copies the network to all of them and sums gradients on one."""

import torch

from allstep.common.base.errors import UserError, note
from allstep.pytorch.strategies.reduction import Ordered, Reduction
from allstep.pytorch.strategies.strategy import Single


class DataParallel(Single):
    """The five steps in one process; DDP is faster on the same GPUs.

    Batch norm normalises each device's samples by themselves and validates with the running statistics of the first
    device: the copies on the other devices lose theirs after each pass, as nn.DataParallel documents.
    """

    _type: torch.dtype
    """Type of autocast, from the first pass on."""

    def pin_device(self) -> torch.device:
        self._num_devices = 1 if self.gpu is None else torch.cuda.device_count()
        if self.flags.num_gpus:
            if self.flags.num_gpus > self._num_devices:
                raise UserError(
                    f"expected --num-gpus to be at most {self._num_devices}, the devices of this machine, "
                    f"received {self.flags.num_gpus}; lower it"
                )
            self._num_devices = self.flags.num_gpus
        if self._num_devices == 1:
            note("data-parallel runs on one device")
        return super().pin_device()

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        if self.gpu is None:
            return Reduction(network, optimizer)
        model = torch.nn.DataParallel(network, device_ids=list(range(self._num_devices)))
        # Its threads do not inherit the type in which autocast computes.
        model.register_forward_pre_hook(lambda *_: setattr(self, "_type", torch.get_autocast_dtype("cuda")))
        network.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", self._type))
        return Reduction(model, optimizer)

    def reduce_in_order(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Ordered:
        if self._num_devices > 1:
            raise UserError(
                "expected one GPU for --slices with --strategy data-parallel, whose GPUs share each pass, received "
                f"{self._num_devices}; give --num-gpus 1 or --strategy ddp"
            )
        return super().reduce_in_order(network, optimizer)
