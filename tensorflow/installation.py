"""Report on the installed TensorFlow as JSON, for `allstep doctor`, which does not import it.

python -m allstep.tensorflow.installation
"""

import tensorflow as tf

from allstep.common.process.installation import report


def main() -> None:
    """Print an `Installation`."""
    cuda = tf.sysconfig.get_build_info().get("cuda_version")
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    report("horovod.tensorflow", version=tf.__version__, cuda=cuda, num_gpus=num_gpus)


if __name__ == "__main__":
    main()
