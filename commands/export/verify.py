"""Load an exported file by its format's own runtime, and save its outputs; run as a program in a fresh process.

    python -I verify.py FORMAT FILE SAMPLES.npy OUTPUTS.npz MODEL

It stands alone: importing allstep fails in it, as where the file will be used. MODEL is JSON that says which library
has the network, if one does; without one, the outputs of a file of weights are its arrays. For Keras' format it says
which file of the user has the classes of layers; it is run only if Keras does not know them.
"""

import gc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


class _WithoutAllstep:
    """Finder that refuses to import allstep."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "allstep":
            raise ImportError("an exported file must not need allstep")
        return None


def _state(form, path):
    import torch

    if form == "state-dict":
        return torch.load(path, weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def _library_network(model):
    """Return a library's network of this name."""
    if model["library"] == "timm":
        import timm

        shape = {"num_classes": model["num_classes"], "in_chans": model["channels"]}
        return timm.create_model(model["name"], **shape, **model["options"])
    from torchvision import models

    return models.get_model(model["name"], weights=None, num_classes=model["num_classes"], **model["options"])


def _classes(file):
    """Return the classes of a file by their names."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader  # it was run before
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: one for name, one in vars(module).items() if isinstance(one, type)}


def _outputs(form, path, samples, model):
    if form in ("state-dict", "safetensors", "torch-export"):
        import torch

        if form == "torch-export":
            return {"outputs/0": torch.export.load(path).module()(torch.from_numpy(samples)).detach().numpy()}
        state = _state(form, path)
        if model is None:
            return {name: tensor.numpy() for name, tensor in state.items()}
        network = _library_network(model)
        network.load_state_dict(state, strict=True)
        with torch.no_grad():
            return {"outputs/0": network.eval()(torch.from_numpy(samples)).numpy()}
    if form == "onnx":
        import onnxruntime  # pyright: ignore[reportMissingImports] (an extra)

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return {"outputs/0": session.run(None, {session.get_inputs()[0].name: samples})[0]}
    import tensorflow as tf

    if form == "saved-model":
        loaded: Any = tf.saved_model.load(path)  # kept: without it, its variables are gone
        return {"outputs/0": loaded.serve(tf.constant(samples)).numpy()}
    import keras

    try:
        restored: Any = keras.models.load_model(path)
    except Exception:
        if model is None:
            raise
        restored = keras.models.load_model(path, custom_objects=_classes(Path(model["file"])))
        return {**_leaves(restored(samples, training=False)), "needs_file": np.ones(1)}
    return _leaves(restored(samples, training=False))


def _leaves(outputs):
    """Return the arrays of what a model of Keras returns, by names that begin with outputs/."""
    import keras

    return {f"outputs/{number}": np.asarray(one) for number, one in enumerate(keras.tree.flatten(outputs))}


if __name__ == "__main__":
    gc.disable()  # the process is short, and garbage collection would slow the import of a framework
    sys.meta_path.insert(0, _WithoutAllstep())  # pyright: ignore[reportArgumentType]
    form, path, samples, outputs, model = sys.argv[1:]
    np.savez(outputs, **_outputs(form, path, np.load(samples), json.loads(model)))  # pyright: ignore[reportArgumentType]
