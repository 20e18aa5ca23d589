"""DistributedDataParallel: one process a GPU or core, gradients averaged bucket by bucket as backward fills them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from allstep.common.cli.strategy_flags import many_gradients
from allstep.common.config.train_config import StrategyConfig
from allstep.pytorch.compat import known_arguments
from allstep.pytorch.passes import ReducedPass, TrainPass
from allstep.pytorch.strategies.process_group import ProcessGroup
from allstep.pytorch.strategies.reduction import Reduction

# PowerSGD keeps what it has not sent yet for the next step; the first steps go uncompressed, since DDP rebuilds its
# buckets in the first one.
_POWERSGD_FIRST_STEP = 2


# Before torch 2.13 it was broadcast_buffers, which leaves them out of DDP's own broadcast, too; all ranks begin with
# the same ones.
_NO_BUFFERS = known_arguments(DistributedDataParallel.__init__, forward_sync_buffers=False) or {
    "broadcast_buffers": False
}


class DDP(ProcessGroup):
    """The five steps in DDP; `ProcessGroup` has the first, `Strategy` the second."""

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        return _Buckets(self.compiled(network), optimizer, self.flags)


class _Buckets(Reduction):
    """DDP's own all-reduces."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        self._gradients = many_gradients([name for name, _ in network.named_parameters()])
        # It also compares the strides of axes of length 1, as of images of one channel, where they mean nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._ddp = DistributedDataParallel(
            network,
            bucket_cap_mb=flags.bucket_size,
            # Step 4 does this, with tensors of any type.
            init_sync=False,
            # Each rank keeps the statistics of its own samples until the worker averages them.
            **_NO_BUFFERS,
            gradient_as_bucket_view=flags.gradient_as_bucket_view,
            # A static graph reduces in every backward pass, also in those that only add up.
            static_graph=flags.static_graph and flags.accumulate_steps == 1,
        )
        if flags.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=_POWERSGD_FIRST_STEP)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif flags.comm_hook != "none":
            self._ddp.register_comm_hook(None, getattr(default_hooks, f"{flags.comm_hook}_compress_hook"))
        # Validation has no gradients to average.
        super().__init__(self._ddp, optimizer, eval_model=network)

    def train_pass(self, one_pass: TrainPass) -> ReducedPass:
        def reduced(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                return one_pass(inputs, targets, loss_weight)

        return reduced

    def pending_tensors(self) -> Sequence[str]:
        # DDP does not tell which bucket is under way.
        return (f"the all-reduce of DDP's buckets of {self._gradients}",)
