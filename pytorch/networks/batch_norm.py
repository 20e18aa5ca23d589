"""Batch norm with the same state in both frameworks; `tensorflow/networks/batch_norm.py` computes the same."""

import torch
from torch import nn


class BatchNorm(nn.BatchNorm2d):
    """PyTorch's batch norm without a count of batches, which Keras does not have."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.num_batches_tracked = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `values`, (samples, channels, height, width).

        A single sample of one pixel, to which small images shrink in the last layers, becomes the shift, as in
        TensorFlow; PyTorch's batch norm raises an error.
        """
        if not self.training or values.numel() > values.shape[1]:
            return super().forward(values)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        with torch.no_grad():
            self.running_mean.lerp_(values.flatten(), self.momentum)
            self.running_var.lerp_(torch.zeros_like(self.running_var), self.momentum)
        shape = (1, -1, 1, 1)
        # Without "1 *", the bias gradient would share memory with the output's gradient, and so with the bias gradient
        # of a shortcut; Horovod averages gradients in place.
        return (values - values) * self.weight.view(shape) + 1 * self.bias.view(shape)
