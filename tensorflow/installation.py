"""Report on the installed TensorFlow as JSON, for `allstep doctor`, which does not import it.

python -m allstep.tensorflow.installation
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import tensorflow as tf

from allstep.common.base.errors import summary
from allstep.common.files.records import to_json
from allstep.common.process.gpu_libraries import loaded_libraries
from allstep.common.process.installation import Installation


def main(argv: Sequence[str] | None = None) -> None:
    """Print an `Installation`."""
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    installation = Installation(
        version=tf.__version__,
        cuda=tf.sysconfig.get_build_info().get("cuda_version"),
        num_gpus=num_gpus,
        no_peer_access=(),
        horovod_error=_horovod_error(),
        libraries={name: tuple(paths) for name, paths in loaded_libraries().items()},
    )
    print(json.dumps(to_json(installation)))


def _horovod_error() -> str | None:
    try:
        import horovod.tensorflow as hvd

        hvd.is_initialized()  # the import succeeds even without the compiled library
    except Exception as error:  # any error is part of the report
        return summary(error)


if __name__ == "__main__":
    main()
