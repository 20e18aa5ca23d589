"""Custom network for --model, and custom loss for --loss.

python pytorch/train.py --model examples/my_model.py:build --loss examples/my_model.py:loss
python tensorflow/train.py --model examples/my_model.py:build --loss examples/my_model.py:loss

A file for one framework only needs `build` and `loss`. This one is for both frameworks, and gives layers the same names
in both, so that they start from the same weights and their curves can be compared.
"""

from collections import OrderedDict


def build_pytorch(input_shape, num_classes):
    """Return a network for images (n, channels, height, width); `input_shape` is (height, width, channels)."""
    from torch import nn

    height, width, channels = input_shape
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, 16, 3, padding=1),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            head=nn.Linear(16 * height * width, num_classes),
        )
    )


def build_tensorflow(input_shape, num_classes):
    """Return a network for images (n, height, width, channels)."""
    import keras

    return keras.Sequential(
        [
            keras.layers.Input(input_shape),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="conv"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(num_classes, name="head"),
        ]
    )


def loss_pytorch(outputs, targets):
    """Return each sample's squared distance of probabilities from its label: (n, classes) and (n,) -> (n,)."""
    from torch.nn.functional import one_hot

    return (outputs.softmax(1) - one_hot(targets, outputs.shape[1])).square().sum(1)


def loss_tensorflow(outputs, targets):
    """Return the same in TensorFlow."""
    import tensorflow as tf

    return tf.reduce_sum(tf.square(tf.nn.softmax(outputs) - tf.one_hot(targets, outputs.shape[1])), 1)
