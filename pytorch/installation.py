"""Report on the installed PyTorch as JSON, for `allstep doctor`, which does not import it.

python -m allstep.pytorch.installation
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch

from allstep.common.base.errors import summary
from allstep.common.files.records import to_json
from allstep.common.process.gpu_libraries import loaded_libraries
from allstep.common.process.installation import Installation


def main(argv: Sequence[str] | None = None) -> None:
    """Print an `Installation`."""
    # With a driver that is too old, device_count() still counts GPUs, but the next call would fail.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = itertools.permutations(range(num_gpus), 2)
    installation = Installation(
        version=torch.__version__,
        cuda=torch.version.cuda,
        num_gpus=num_gpus,
        no_peer_access=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        horovod_error=_horovod_error(),
        libraries={name: tuple(paths) for name, paths in loaded_libraries().items()},
    )
    print(json.dumps(to_json(installation)))


def _horovod_error() -> str | None:
    try:
        import horovod.torch as hvd

        hvd.is_initialized()  # the import succeeds even without the compiled library
    except Exception as error:  # any error is part of the report
        return summary(error)


if __name__ == "__main__":
    main()
