"""Train networks with Keras' own batch norms, and print the loss and the moving statistics of each as JSON."""

import json
import sys

import keras
import numpy as np
from keras import layers

from allstep.common.base.errors import print_line
from allstep.common.launch.placement import find_placement
from allstep.tensorflow import Session

SIZE, CLASSES = 31, 3  # of the last sample one rank has none


def network(*inner):
    return keras.Sequential([keras.Input((8, 8, 3)), *inner, layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)])


def block():
    return keras.Sequential([layers.Conv2D(4, 3), layers.BatchNormalization(name="norm")])


def called_twice():
    norm, inputs = layers.BatchNormalization(), keras.Input((8, 8, 3))
    outputs = norm(layers.ReLU()(norm(inputs)))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(outputs)))


NETWORKS = {
    "asked for": lambda: network(layers.Conv2D(4, 3), layers.BatchNormalization(momentum=0.5)),
    "in networks inside": lambda: network(block(), block()),
    "called twice": called_twice,
    "of rows": lambda: network(layers.BatchNormalization(axis=1, center=False)),
    "brought": lambda: network(layers.Conv2D(4, 3), layers.BatchNormalization(synchronized=True)),
}


def train(name):
    """Return the loss of an epoch, of which the last batch is smaller, and the state of the batch norms."""
    random = np.random.default_rng(0)
    labels = np.arange(SIZE) % CLASSES
    images = random.normal(size=(SIZE, 8, 8, 3)).astype(np.float32) + labels[:, None, None, None]
    keras.utils.set_random_seed(1)
    model = NETWORKS[name]()
    flags = {"sync_batch_norm": True} if sys.argv[1] == "horovod" and name != "brought" else {}
    session = Session(
        model, (images, labels), validation=(images[:4], labels[:4]), epochs=1, optimizer=keras.optimizers.SGD(0.05),
        base_lr=0.05, global_batch_size=15, strategy=sys.argv[1], **flags,
    )  # fmt: skip
    loss = session.fit()[-1]["train_loss"]
    return [float(loss), *(np.asarray(one).tolist() for one in model.variables if "moving" in one.path)]


found = {name: train(name) for name in NETWORKS}
if find_placement().rank == 0:
    print_line(json.dumps(found))
