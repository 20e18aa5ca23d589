"""Record that an installed framework reports about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Installation:
    """What a framework says of itself."""

    version: str
    cuda: str | None
    """The release of CUDA that it was built for; None for CPUs alone."""
    num_gpus: int
    """That it sees."""
    no_peer_access: tuple[tuple[int, int], ...]
    """Pairs of GPUs of which one cannot read the other's memory; PyTorch alone can tell."""
    libraries: dict[str, tuple[str, ...]]
    """NVIDIA's libraries that its process has loaded, with their files."""
    horovod_error: str | None
    """Why Horovod cannot be imported for it."""
