"""What TensorFlow says of itself, as JSON, to `allstep doctor`, which does not import it.

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

        hvd.is_initialized()  # without its compiled part the import alone succeeds
    except Exception as error:  # whatever is wrong with it: it is what is asked for
        return summary(error)


if __name__ == "__main__":
    main()
