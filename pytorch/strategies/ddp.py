"""DistributedDataParallel: one process a GPU or core, gradients averaged bucket by bucket as backward fills them."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from allstep.common.cli.strategy_flags import SUM_OF_SLICES, many_gradients
from allstep.pytorch.compat import known_arguments
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm
from allstep.pytorch.strategies.process_group import ProcessGroup, broadcast_from_rank_0, sum_over_ranks
from allstep.pytorch.strategies.strategy import CompiledTrainStep, EvalStep, TrainStep

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

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(network, sum_over_ranks)
        self.compiled(network)
        if self.flags.slices:  # DDP knows but one gradient a rank
            broadcast_from_rank_0(network)
            return network, optimizer
        self._gradients = many_gradients([name for name, _ in network.named_parameters()])
        # It also compares the strides of axes of length 1, as of images of one channel, where they mean nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model = DistributedDataParallel(
            network,
            bucket_cap_mb=self.flags.bucket_size,
            # Each rank keeps the statistics of its own samples until the worker averages them.
            **_NO_BUFFERS,
            gradient_as_bucket_view=self.flags.gradient_as_bucket_view,
            # A static graph reduces in every backward pass, also in those that only add up.
            static_graph=self.flags.static_graph and self.flags.accumulate_steps == 1,
        )
        if self.flags.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=_POWERSGD_FIRST_STEP)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.flags.comm_hook != "none":
            model.register_comm_hook(None, getattr(default_hooks, f"{self.flags.comm_hook}_compress_hook"))
        return model, optimizer

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Done in `wrap`: by DistributedDataParallel, when it was made."""

    def compile_train_step(self, step: TrainStep) -> CompiledTrainStep:
        if self.flags.slices:  # `SlicedStep` has them meet
            return super().compile_train_step(step)
        model = step.model
        assert isinstance(model, DistributedDataParallel)

        def compiled(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            with contextlib.nullcontext() if is_last else model.no_sync():
                return step(inputs, targets, loss_weight)

        return compiled

    def compile_eval_step(self, step: EvalStep) -> EvalStep:
        """Without DDP: there are no gradients to average."""
        return step if self.flags.slices else dataclasses.replace(step, model=step.model.module)

    def pending_tensors(self) -> Sequence[str]:
        if self.flags.slices:
            return (SUM_OF_SLICES,)
        # DDP does not say which bucket is under way.
        return (f"the all-reduce of DDP's buckets of {self._gradients}",)
