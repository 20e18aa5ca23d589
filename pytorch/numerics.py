"""How PyTorch computes: which versions of it this is written for, in what precision, and whether always alike."""

from __future__ import annotations

import os

import torch

from allstep.common.cli.strategy_flags import check_version
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.horovod_build import check_built_for

OLDEST, NEWEST = (2, 9), (2, 14)
"""The range of versions, by their first two numbers; `strategies/ddp.py` has what differs between them."""


def prepare(config: TrainConfig) -> None:
    """Configure PyTorch for a run, before anything computes.

    Raises:
        UserError: this version is outside the range, or Horovod was built for another one.
    """
    check_version("torch", torch.__version__, OLDEST, NEWEST)
    if config.strategy_name == "horovod":
        check_built_for("pytorch", torch.__version__)
    use_tf32 = config.precision == "tf32"
    # By these names: torch.compile reads them, and would fail where the newer `fp32_precision` alone were set.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = use_tf32
    # cuDNN tries its algorithms for each size of a batch and keeps the fastest, as loops by hand have it. In float32
    # that may be one that rounds more than the usual one, and curves of GPUs shall be those of CPUs.
    torch.backends.cudnn.benchmark = config.precision != "float32" and not config.same_bits
    if config.same_bits:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        # In which order gradients are added depends on what Horovod fuses, and that on timing.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
