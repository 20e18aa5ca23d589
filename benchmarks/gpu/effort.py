"""Sizes of the GPU checks: on a GPU, and on a CPU, where they only show that the checks run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Sizes of everything that is measured."""

    device: str
    """The trainers' --device."""
    seconds: float
    """Seconds that all checks may take together or, in the copy for a check, after which that check is ended."""
    large_shape: tuple[int, int, int]
    """Height, width and channels of ResNet-50's images."""
    large_batch: dict[str, int]
    """Images per step of ResNet-50, by framework."""
    small_batch: dict[str, int]
    """Images per step of the small networks, by name."""
    num_warmup: int
    """Batches before the first that is timed."""
    num_batches: int
    """Batches of ResNet-50 in a timed block; the small networks have five times as many."""
    num_blocks: int
    """Number of timed blocks of each job; jobs take turns block by block."""
    num_images: int
    """JPEG files to train on."""
    decode_threads: int
    exact_epochs: int
    """Epochs of 25 steps over which curves are compared."""
    deterministic_steps: int
    """Number of steps after which two equal runs must have equal bits."""


ON_GPU = Effort(
    device="cuda",
    seconds=470,
    large_shape=(224, 224, 3),
    large_batch={"pytorch": 256, "tensorflow": 128},
    small_batch={"cnn": 64, "resnet18": 128},
    num_warmup=15,
    num_batches=10,
    num_blocks=5,
    num_images=6400,
    decode_threads=16,
    exact_epochs=2,
    deterministic_steps=100,
)
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
