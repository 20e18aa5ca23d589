"""Record that an installed framework reports about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Installation:
    """Installed framework, as its own process reports it."""

    version: str
    cuda: str | None
    """CUDA version that it was built for; None for CPUs only."""
    num_gpus: int
    """Number of GPUs that it sees."""
    no_peer_access: tuple[tuple[int, int], ...]
    """Pairs of GPUs of which one cannot read the other's memory; only PyTorch reports them."""
    libraries: dict[str, tuple[str, ...]]
    """NVIDIA's libraries that its process has loaded, with their files."""
    horovod_error: str | None
    """Error upon importing Horovod for it, if any."""
