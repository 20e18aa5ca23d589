"""Version of PyTorch, and settings of its precision and determinism."""

import os

import torch

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.versions import check_built_for, check_version


def prepare(config: TrainConfig) -> None:
    """Configure PyTorch for a run, before any computation.

    Raises UserError if the version is older than the tested ones, or Horovod was built for another version.
    """
    check_version("torch", torch.__version__)
    if config.strategy_name == "horovod":
        check_built_for("pytorch", torch.__version__)
    use_tf32 = config.precision == "tf32"
    # torch.compile reads these names, and fails if only the newer `fp32_precision` is set.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = use_tf32
    # With benchmark, which hand-written loops usually set, cuDNN tries its algorithms for each batch size and keeps the
    # fastest. In float32 that may round more than the default one, and GPUs must give the same curves as CPUs.
    torch.backends.cudnn.benchmark = config.precision != "float32" and not config.same_bits
    if config.same_bits:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        # The order in which gradients are added depends on Horovod's fusion, which depends on timing.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")


def check_settings(device: torch.device) -> None:
    """Refuse an autocast that a program has around training, and tensors without values by default."""
    if torch.empty(0).is_meta:
        raise UserError("expected tensors with values, received meta as the default device of torch; leave it out")
    if torch.is_autocast_enabled(device.type):
        raise UserError(f"expected no autocast around training, received one for {device.type}; give --precision bf16")
