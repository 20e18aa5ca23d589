"""DistributedDataParallel: one process a GPU or core, gradients averaged bucket by bucket as backward fills them."""

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import many_gradients
from allstep.common.config.train_config import StrategyConfig
from allstep.pytorch.compat import known_arguments
from allstep.pytorch.passes import ReducedPass, TrainPass
from allstep.pytorch.strategies.process_group import ProcessGroup
from allstep.pytorch.strategies.reduction import Reduction, all_trainable

# PowerSGD carries its compression error over to the next step, so the buckets must not change: DDP rebuilds them in the
# first step, which is therefore not compressed.
_POWERSGD_FIRST_STEP = 2

# Before torch 2.13 this was broadcast_buffers, which also turns off DDP's initial broadcast of buffers.
_NO_BUFFERS = known_arguments(DistributedDataParallel.__init__, forward_sync_buffers=False) or {
    "broadcast_buffers": False
}


class DDP(ProcessGroup):
    """The five steps in DDP; `ProcessGroup` has the first, `Strategy` the second."""

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        for name in (name for name, one in network.named_modules() if getattr(one, "sparse", False) is True):
            # torch 2.14 divides the gradients below it by the number of ranks twice.
            raise UserError(f"--strategy ddp needs dense gradients, {name} has sparse ones; build it with sparse=False")
        kind = _SearchedBuckets if self.flags.find_unused_parameters else _Buckets
        return kind(self.compiled(network), optimizer, self.flags)


class _Buckets(Reduction):
    """DDP's own all-reduces, for the same parameters in each step."""

    finds_unused = False

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        # A static graph reduces in every backward pass, also in those that only add up.
        is_static = flags.static_graph and flags.accumulate_steps == 1 and not self.finds_unused
        named = list(network.named_parameters())
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        # A static graph may lack parameters, but the same ones in all steps.
        self._missing = None if is_static else [not parameter.requires_grad for parameter in self._parameters]
        self._gradients = many_gradients(self._names)
        # DDP also compares strides of axes of length 1, such as the channel of grey images, where they mean nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._ddp = DistributedDataParallel(
            network,
            bucket_cap_mb=flags.bucket_size,
            # Step 4 does this, with tensors of any type.
            init_sync=False,
            # Each rank keeps the statistics of its own samples until the worker averages them.
            **_NO_BUFFERS,
            gradient_as_bucket_view=flags.gradient_as_bucket_view,
            static_graph=is_static,
            find_unused_parameters=self.finds_unused,
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
            try:
                with contextlib.nullcontext() if is_last else self._ddp.no_sync():
                    return one_pass(inputs, targets, loss_weight)
            except RuntimeError:  # DDP's own check, which does not name the parameter
                missing, before = self._missing_gradients(), self._missing or []
                new = [had_none and not has_none for has_none, had_none in zip(missing, before, strict=False)]
                if any(new):
                    raise self._refused(missing, new) from None
                raise

        return reduced

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        missing = self._missing_gradients()
        self._missing = self._missing or missing
        if missing != self._missing:
            raise self._refused(missing, [one != other for one, other in zip(missing, self._missing, strict=True)])
        return loss_sum

    def _missing_gradients(self) -> list[bool]:
        return [parameter.grad is None for parameter in self._parameters]

    def _refused(self, missing: Sequence[bool], unexpected: Sequence[bool]) -> UserError:
        number = unexpected.index(True)
        has, had = ("no gradient", "one") if missing[number] else ("a gradient", "none")
        return UserError(
            f"{self._names[number]} has {has} in a step, where DDP expects {had}: the network does not use the same "
            "parameters in all steps; give --find-unused-parameters"
        )

    def pending_tensors(self) -> Sequence[str]:
        # DDP does not tell which bucket is pending.
        return (f"the all-reduce of DDP's buckets of {self._gradients}",)


class _SearchedBuckets(_Buckets):
    """DDP's own all-reduces, for the parameters that some rank uses in a step (--find-unused-parameters)."""

    finds_unused = True

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        with all_trainable(one for one in network.parameters() if one.is_floating_point()):  # so each is in a bucket
            super().__init__(network, optimizer, flags)

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        return loss_sum
