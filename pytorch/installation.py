"""Report on the installed PyTorch as JSON, for `allstep doctor`, which does not import it.

python -m allstep.pytorch.installation
"""

import itertools

import torch

from allstep.common.process.installation import report


def main() -> None:
    """Print an `Installation`."""
    # With a driver that is too old, device_count() still counts GPUs, but the next call would fail.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = itertools.permutations(range(num_gpus), 2)
    no_peer_access = tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))
    cuda = torch.version.cuda
    report("horovod.torch", version=torch.__version__, cuda=cuda, num_gpus=num_gpus, no_peer_access=no_peer_access)


if __name__ == "__main__":
    main()
