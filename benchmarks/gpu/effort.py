"""Sizes of the GPU checks: on a GPU, and on a CPU, where they only show that the checks run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Effort:
    """Sizes of everything that is measured; the defaults are those on a GPU."""

    device: str = "cuda"
    """The trainers' --device."""
    seconds: float = 470
    """Seconds that all checks may take together or, in the copy for a check, after which that check is ended."""
    large_shape: tuple[int, int, int] = (224, 224, 3)
    """Height, width and channels of ResNet-50's images."""
    large_batch: Mapping[str, int] = field(default_factory=lambda: {"pytorch": 256, "tensorflow": 128})
    """Images per step of ResNet-50, by framework."""
    small_batch: Mapping[str, int] = field(default_factory=lambda: {"cnn": 64, "resnet18": 128})
    """Images per step of the small networks, by name."""
    num_warmup: int = 15
    """Batches before the first that is timed."""
    num_batches: int = 10
    """Batches of ResNet-50 in a timed block; the small networks have five times as many."""
    num_blocks: int = 5
    """Number of timed blocks of each job; jobs take turns block by block."""
    num_images: int = 6400
    """JPEG files to train on."""
    decode_threads: int = 16
    exact_epochs: int = 2
    """Epochs of 25 steps over which curves are compared."""
    deterministic_steps: int = 100
    """Number of steps after which two equal runs must have equal bits."""


ON_GPU = Effort()
ON_CPU = Effort(
    device="cpu",
    seconds=3600,
    large_shape=(32, 32, 3),
    large_batch={"pytorch": 4, "tensorflow": 4},
    small_batch={"cnn": 2, "resnet18": 2},
    num_warmup=1,
    num_batches=1,
    num_blocks=2,
    num_images=40,
    decode_threads=1,
    exact_epochs=1,
    deterministic_steps=2,
)
