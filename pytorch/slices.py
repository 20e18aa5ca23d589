"""The backward part of a step with --slices: separate gradients for each slice, which `Ordered` adds up."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.data.loader import Batch, Slice
from allstep.common.data.slices import TreeSum
from allstep.common.exact.audit import audit
from allstep.common.exact.replica_check import digest
from allstep.common.recipe.weights import step_seed
from allstep.pytorch.inputs import Inputs
from allstep.pytorch.observer import Observer, observed
from allstep.pytorch.passes import ReducedPass
from allstep.pytorch.precision import Precision
from allstep.pytorch.step_trace import tensor_digest
from allstep.pytorch.strategies.reduction import Ordered, trainable

OnePass = Callable[[Batch, int], torch.Tensor]
"""Takes a slice and its number, adds its gradients to those of the parameters, returns the sum of its losses."""
Give = Callable[[int, int, torch.Tensor], None]
"""Takes the numbers of a slice and of a bucket, and the slice's vector of that bucket."""


@dataclass(frozen=True)
class Slices:
    """Computes this rank's slices one after another, each starting with the running statistics before the step."""

    reduction: Ordered
    one_pass: ReducedPass
    inputs: Inputs
    precision: Precision
    observers: Sequence[Observer]
    collectives: Collectives
    seed: int

    def __call__(self, batch: Batch, loss_scale: float, num_steps: int) -> torch.Tensor:
        """See `step.Backward`; the sum of losses is in the reduction. Raises UnequalBits as `audit` does."""
        self.reduction.begin(min(self.reduction.sum.num_slices, batch.num_global))
        with self.reduction.whole_weights():
            self._add_own(batch, lambda part, number: self._pass(part, number, loss_scale, num_steps))
        return torch.zeros(())

    def _pass(self, part: Batch, number: int, loss_scale: float, num_steps: int) -> torch.Tensor:
        # Dropout draws the same numbers for a slice on any rank.
        seed_generators(step_seed(self.seed, num_steps, number), self.inputs.device)
        inputs, targets = self.inputs(part)
        loss_weight = part.loss_weight * loss_scale
        with self.precision.computing(), observed(self.observers, number, loss_weight * part.num_samples):
            return self.one_pass(inputs, targets, loss_weight, is_last=True)

    def _add_own(self, batch: Batch, one_pass: OnePass) -> None:
        """Add up the vectors of this rank's slices within the tree, and begin their sums over all ranks.

        In an audited step the sums begin after the audit.
        """
        reduction = self.reduction
        sums: list[TreeSum[torch.Tensor]] = [TreeSum(reduction.sum.num_slices) for _ in reduction.buckets]
        digests: dict[int, list[int]] = defaultdict(list)
        last = _in_order(batch.slices)[-1].number

        def give(number: int, bucket: int, vector: torch.Tensor) -> None:
            if batch.read_slice_of:
                digests[number].append(int(tensor_digest(vector)))  # before another one is added to it
            sums[bucket].add((number, number + 1), vector)
            if number == last and not batch.read_slice_of:
                reduction.begin_sum(sums[bucket].partial)

        self._slices(batch, one_pass, give)
        if batch.read_slice_of:

            def compute(other: Batch) -> dict[int, int]:
                found: dict[int, list[int]] = defaultdict(list)

                def keep(number: int, bucket: int, vector: torch.Tensor) -> None:
                    found[number].append(int(tensor_digest(vector)))

                self._slices(other, one_pass, keep)
                return _of_slices(found)

            audit(batch, _of_slices(digests), compute, self.collectives, reduction.sum.num_slices)
            for one in sums:
                reduction.begin_sum(one.partial)

    def _slices(self, batch: Batch, one_pass: OnePass, give: Give) -> None:
        """Compute the slices of a batch, and pass each bucket of each slice to `give`."""
        statistics, weights = self.reduction.statistics, trainable(self.reduction.model)
        before = [tensor.clone() for tensor in statistics]
        for one in _in_order(batch.slices):
            number: int = one.number
            self._buckets_of(
                batch.part(one), weights, lambda part, number=number: one_pass(part, number), partial(give, number)
            )
            for tensor, value in zip(statistics, before, strict=True):
                tensor.copy_(value)

    def _buckets_of(
        self,
        part: Batch,
        weights: Sequence[torch.nn.Parameter],
        one_pass: Callable[[Batch], torch.Tensor],
        give: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Compute a slice, and pass its buckets in order to `give`, each as soon as backward has its gradients.

        The last bucket is passed on when the pass has ended.
        """
        buckets = self.reduction.buckets
        if not part.num_samples:
            for number, bucket in enumerate(buckets):
                give(number, weights[0].new_zeros(self.reduction.sum.num_parts * bucket.part_size))
            return
        groups = [weights[bucket.parameters] for bucket in buckets]
        missing = [set(group) for group in groups]
        have_gradients: dict[torch.Tensor, bool] = {}
        num_given = 0

        def give_next() -> None:
            nonlocal num_given
            group, first = groups[num_given], list[torch.Tensor]()
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in group]
            for weight in group:
                have_gradients[weight], weight.grad = weight.grad is not None, None
            for observer in self.observers:
                observer.see_slice(group, gradients)
            if num_given == len(groups) - 1:
                first = self.reduction.first(loss_sum, [have_gradients[weight] for weight in weights])
            give(num_given, self.reduction.vector(buckets[num_given], gradients, first))
            num_given += 1

        def see(number: int, weight: torch.Tensor) -> None:
            if number < num_given:
                raise UserError(
                    "expected one gradient a pass of each weight for --slices on several ranks, received another one "
                    "when the first was on its way; call torch.utils.checkpoint with use_reentrant=False, or raise "
                    "--bucket-size"
                )
            missing[number].discard(weight)
            while not missing[num_given]:
                give_next()

        with ExitStack() as hooks:
            for number, group in enumerate(groups[:-1]):
                for weight in group:
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(partial(see, number)))
            loss_sum = one_pass(part)
        while num_given < len(groups):
            give_next()


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed like torch.manual_seed, which formats its stack at each call in a process without a GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _in_order(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices without samples first, since the sums begin during the backward pass of the last slice."""
    return sorted(slices, key=lambda one: one.end > one.begin)


def _of_slices(digests: dict[int, list[int]]) -> dict[int, int]:
    """Return the digest of each slice from those of its buckets."""
    return {number: digest(np.array(found)) for number, found in digests.items()}
