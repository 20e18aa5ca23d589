"""The worker in PyTorch: a facade over inputs, the training step, validation and the state."""

import resource
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from allstep.common.catalog.losses import are_of_scores, default_loss
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.exact.trace import OpenRecorder
from allstep.common.recipe.noise_scale import parts_of
from allstep.common.training import worker
from allstep.pytorch.building import build_optimizer_state, build_precision, build_step
from allstep.pytorch.inputs import Inputs
from allstep.pytorch.losses import build_loss, scores
from allstep.pytorch.numerics import check_settings
from allstep.pytorch.passes import EvalPass
from allstep.pytorch.state import State
from allstep.pytorch.step_trace import StepTrace
from allstep.pytorch.strategies.strategy import Strategy


class Worker(worker.Worker):
    """Drives a network on one device; `allstep.common.training.worker.Worker` says what each method does."""

    framework = "pytorch"

    def __init__(
        self,
        network: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        strategy: Strategy,
        device: torch.device,
        dataset: Dataset,
        *,
        measures_noise: bool = False,
    ) -> None:
        """Build the step, the state and validation.

        `network` has the weights under their canonical names; those of other ranks are on the device meta.
        `measures_noise` tells whether to measure the gradients of passes for the noise scale.
        """
        self.device, self.collectives, self._strategy, self._network = device, strategy.collectives, strategy, network
        passes = config.parallel.accumulate_steps
        self.num_parts = parts_of(self.collectives.world_size, passes, measures=measures_noise)
        self._inputs = Inputs(dataset, device, reports=self.collectives.rank == 0)
        check_settings(device)
        self._precision = build_precision(config, strategy, device)
        parts = self._inputs, self._precision
        self._step = build_step(
            network, optimizer, config, strategy, *parts, dataset=dataset, measures_noise=bool(self.num_parts)
        )
        self._state = State(network, build_optimizer_state(optimizer, network, config, device), self._step, strategy)
        loss = config.loss or default_loss(dataset.task)
        self._eval_pass = strategy.eval_pass(EvalPass(strategy.reduction.eval_model, build_loss(loss)))
        self._of_scores, self._output_shape = are_of_scores(config, dataset), dataset.output_shape
        # Validation has too few passes to make up for the time of compiling it.
        self._eager = partial(torch.compiler.set_stance, "force_eager") if strategy.flags.compile else nullcontext

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        trace = StepTrace(self._network, open_recorder, sliced=self._strategy.reduction.is_ordered)
        self._step.observers.append(trace)
        return trace

    def eval_step(self, batch: Batch) -> tuple[float, np.ndarray]:
        inputs, targets = self._inputs(batch)
        model = self._strategy.reduction.model
        model.eval()
        with torch.no_grad(), self._precision.computing(), self._eager():
            loss_sum, outputs = self._eval_pass(inputs, targets)
            if outputs is not None and self._of_scores:
                outputs = scores(outputs, targets)
        model.train()
        if outputs is None:
            shape = (*self._output_shape[:-1], 3) if self._of_scores else self._output_shape
            return loss_sum, np.zeros((len(inputs), *shape), np.float32)
        return loss_sum, outputs.float().numpy(force=True)  # a script's may require gradients

    def evaluating(self) -> AbstractContextManager:
        return self._strategy.reduction.whole_weights()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, **self._strategy.versions()}

    def peak_memory_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
