"""Exported files, each loaded by its own runtime. Oracle: the outputs of the run's own network, and exact lines."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import torch
import torchvision
import yaml
from keras.layers import Dense
from numpy.testing import assert_allclose
from PIL import Image
from ranks import full, train
from requirements import need_packages
from safetensors.torch import load_file

import allstep
from allstep.commands.export import command
from allstep.common.base.errors import UserError
from allstep.common.catalog.user_modules import run_file
from allstep.common.data.datasets import Dataset
from allstep.common.process import requirements
from allstep.pytorch import loaded
from allstep.tensorflow.loaded import write as write_of_keras

DATA = ("--dataset", "image-folder", "--image-size", "32", "--decode-threads", "1", "--batch-size", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part in ("train", "val"):
        for number, name in enumerate(("cat_*", "dog")):
            (folder / part / name).mkdir(parents=True)
            for index in range(3):
                pixels = draws.integers(0, 99, (40, 40, 3)) + 60 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def resnet(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    train("pytorch", "alone", 1, output, *DATA, "--data-dir", folder, "--model", "resnet18", "--epochs", "1")
    return output


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    train("tensorflow", "alone", 1, output, "--model", "cnn", "--epochs", "1", "--checkpoint-every", "20")
    return output


@functools.cache
def export(run: Path, form: str, *flags: object) -> Path:
    command.main([str(run), "--to", form, *map(str, flags)])
    return run / "export" / f"model{command.FORMATS[form].suffix}"


def test_weights_have_the_names_of_torchvision(resnet, folder):
    trained = allstep.load(resnet)
    inputs = trained.preprocess(sorted((folder / "val").glob("*/*")))
    expected = trained.model(inputs).detach()
    for form, read in (("state-dict", torch.load), ("safetensors", load_file)):
        network = torchvision.models.resnet18(num_classes=2)
        network.load_state_dict(read(export(resnet, form)), strict=True)
        torch.testing.assert_close(network.eval()(inputs).detach(), expected)


@pytest.mark.parametrize(
    ("framework", "form"),
    [
        *(("pytorch", form) for form in ("state-dict", "safetensors", "torch-export", "onnx")),
        *(("tensorflow", form) for form in ("keras", "saved-model", "onnx")),
    ],
)
def test_a_full_disk_is_told_as_such(framework, form, tmp_path):
    model = torch.nn.Linear(99, 99) if framework == "pytorch" else keras.Sequential([keras.Input((99,)), Dense(99)])
    network = SimpleNamespace(model=model, device=torch.device("cpu"))
    trained: Any = SimpleNamespace(
        description=SimpleNamespace(model="mine", dataset=lambda: Dataset(None, None, (99,), 9))
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            command._write(
                form, tmp_path / f"out{command.FORMATS[form].suffix}", framework, network, trained, scales=False
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_card_tells_the_step_of_the_weights_that_were_read(digits, tmp_path, capfd):
    shutil.copytree(digits, tmp_path / "run")
    *_, before, newest = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    arrays = newest / "model.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-8] + bytes(8))
    page = Path(f"{export(tmp_path / 'run', 'safetensors')}.md").read_text()
    assert f"Step {int(before.name.removeprefix('step-'))}, epoch 0." in page
    assert newest.name in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [("timm:resnet10t", "resnet10t", {}), full("vit-tiny", "vit_tiny_patch16_224", {"img_size": 32})],
)
def test_weights_have_the_names_of_timm(model, name, options, folder, tmp_path):
    timm = pytest.importorskip("timm")
    train("pytorch", "alone", 1, tmp_path / "run", *DATA, "--data-dir", folder, "--model", model, "--epochs", "1")
    trained = allstep.load(tmp_path / "run")
    inputs = trained.preprocess(sorted((folder / "val").glob("*/*")))
    network = timm.create_model(name, num_classes=2, **options)
    network.load_state_dict(torch.load(export(tmp_path / "run", "state-dict")), strict=True)
    torch.testing.assert_close(network.eval()(inputs).detach(), trained.model(inputs).detach())


@pytest.mark.full
def test_a_graph_takes_batches_of_any_size_and_pictures_unscaled(resnet, folder):
    trained, paths = allstep.load(resnet), sorted((folder / "val").glob("*/*"))
    expected = trained.model(trained.preprocess(paths)).detach()
    pixels = torch.from_numpy(trained.samples(paths)[0]).permute(0, 3, 1, 2)
    module = torch.export.load(export(resnet, "torch-export", "--with-preprocessing")).module()
    for size in (1, 3, len(paths)):
        torch.testing.assert_close(module(pixels[:size].contiguous()), expected[:size], rtol=1e-5, atol=1e-5)


def test_the_card_has_what_hubs_expect(resnet):
    page = Path(f"{export(resnet, 'safetensors')}.md").read_text()
    _, head, text = page.split("---\n", 2)
    head = yaml.safe_load(head)
    assert head["pipeline_tag"] == "image-classification" and head["library_name"] == "pytorch"
    [result] = head["model-index"][0]["results"]
    assert result["metrics"][0]["type"] == "accuracy" and result["dataset"]["name"] == "image-folder"
    for shown in (r"- 0: cat\_\*", "- 1: dog", "| 1 | ", "resized to 32 x 32", f"torch: {torch.__version__}"[:10]):
        assert shown in text, shown
    assert "/" not in text.partition("## Training")[2]  # no paths of this machine


def test_keras_and_tensorflow(digits):
    import keras
    import tensorflow as tf

    trained = allstep.load(digits)
    samples = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    expected = trained.model(trained.preprocess(samples)).numpy()
    assert_allclose(
        keras.models.load_model(export(digits, "keras", "--with-preprocessing"))(samples), expected, atol=1e-5
    )
    loaded = tf.saved_model.load(export(digits, "saved-model"))
    assert_allclose(loaded.serve(trained.preprocess(samples)), expected, atol=1e-5)
    with pytest.raises(UserError, match="expected --output to be free, received the folder"):
        command.main([str(digits), "--to", "saved-model"])


@pytest.mark.launch
def test_a_network_with_layers_of_the_user(tmp_path, capsys):
    """Oracle: the network that was trained."""
    import keras
    import tensorflow as tf

    from allstep.tensorflow import Session

    file, draws = Path(__file__).parent / "programs" / "custom_layers.py", np.random.default_rng(0)
    own = run_file(file)
    arrays = draws.standard_normal((32, 4, 4, 1)).astype(np.float32), np.arange(32) % 3
    np.savez(tmp_path / "data.npz", x_train=arrays[0], y_train=arrays[1], x_test=arrays[0], y_test=arrays[1])
    network = own.build((4, 4, 1), 3)
    Session(network, arrays, epochs=1, output_dir=tmp_path / "run").fit()
    flags = ("--model", f"{file}:build", "--dataset", f"npz:{tmp_path / 'data.npz'}")
    loaded = keras.models.load_model(export(tmp_path / "run", "keras", *flags), custom_objects={"Scale": own.Scale})
    assert "it needs the classes of custom_layers.py" in capsys.readouterr().out
    saved = tf.saved_model.load(export(tmp_path / "run", "saved-model", *flags))
    for outputs in (loaded(arrays[0], training=False), saved.serve(arrays[0])):
        assert_allclose(outputs, network(arrays[0], training=False), atol=1e-5)


@pytest.mark.full
def test_batch_norms_become_those_of_keras(tmp_path):
    import keras

    data = ("--dataset", "synthetic", "--synthetic-samples", "64", "--synthetic-shape", "8", "8", "3")
    train("tensorflow", "alone", 1, tmp_path / "run", *data, "--model", "resnet32", "--epochs", "1")
    model = keras.models.load_model(export(tmp_path / "run", "keras"))
    assert "BatchNormalization" in {type(layer).__name__ for layer in model.layers}
    assert not any("allstep" in type(layer).__module__ for layer in model.layers)


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_onnx_of_both_frameworks(digits, framework, tmp_path):
    need_packages("onnx", "onnxruntime", "onnxscript", "tf2onnx")
    import onnxruntime

    path = tmp_path / "\udcff" / "model.onnx"  # of which ONNX Runtime opens no absolute path
    export(digits, "onnx", "--framework", framework, "--with-preprocessing", "--output", path)
    session = onnxruntime.InferenceSession(path.read_bytes())
    samples = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    trained = allstep.load(digits)
    given = samples if framework == "tensorflow" else np.ascontiguousarray(np.moveaxis(samples, -1, 1))
    [outputs] = session.run(None, {session.get_inputs()[0].name: given})
    assert_allclose(outputs, trained.model(trained.preprocess(samples)).numpy(), atol=1e-4)


def test_a_file_that_differs_is_not_kept(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_difference", lambda *arguments: (1.1e-5, False))
    (tmp_path / "a.pt").write_text("before")
    with pytest.raises(SystemExit) as ended:
        command.main([str(digits), "--to", "state-dict", "--output", str(tmp_path / "a.pt")])
    assert ended.value.code == 1 and "differs from the run by 1.1e-05" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"] and (tmp_path / "a.pt").read_text() == "before"


class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class SingularValues(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x[..., None])


class Flattening(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.dense = torch.nn.TransformerEncoder(layer, 1), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.dense(self.encoder(x).reshape(len(x), -1))


def test_networks_of_which_a_default_of_pytorch_makes_no_graph(tmp_path):
    """Oracle: the network. By default a graph has the len() of a tensor as a constant, and layers that ONNX lacks."""
    need_packages("onnx", "onnxruntime", "onnxscript")
    import onnxruntime

    network = SimpleNamespace(model=Flattening().eval())
    dataset = SimpleNamespace(input_shape=(2, 4), input_type="float32")
    for form in ("torch-export", "onnx"):
        loaded.write(form, tmp_path / form, cast(Any, network), cast(Any, dataset), scales=False)
    module, session = (
        torch.export.load(tmp_path / "torch-export").module(),
        onnxruntime.InferenceSession(tmp_path / "onnx"),
    )
    for size in (1, 2, 5):
        inputs = torch.randn(size, 2, 4)
        for outputs in (module(inputs), torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])):
            torch.testing.assert_close(outputs, network.model(inputs), rtol=1e-5, atol=1e-5)


def test_onnx_of_what_keras_computes_by_operators_that_it_lacks(tmp_path):
    """Oracle: the network. Keras computes gelu by erfc."""
    need_packages("onnx", "onnxruntime", "tf2onnx")
    import onnxruntime

    network = SimpleNamespace(model=keras.Sequential([keras.Input((4,)), Dense(3, "gelu")]))
    dataset = SimpleNamespace(input_shape=(4,), input_type="float32")
    write_of_keras("onnx", tmp_path / "out.onnx", cast(Any, network), cast(Any, dataset), scales=False)
    inputs = np.linspace(-9, 9, 20, dtype=np.float32).reshape(5, 4)
    [outputs] = onnxruntime.InferenceSession(tmp_path / "out.onnx").run(None, {"input": inputs})
    assert_allclose(outputs, network.model(inputs), rtol=1e-5, atol=1e-6)
    network.model.add(keras.layers.Discretization([0.5]))
    with pytest.raises(UserError, match="ONNX has no counterpart of TensorFlow's Bucketize"):
        write_of_keras("onnx", tmp_path / "out.onnx", cast(Any, network), cast(Any, dataset), scales=False)


@pytest.mark.launch
def test_a_file_of_keras_with_several_outputs(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, {"features": inputs, "logits": Dense(3)(inputs)})
    model.save(tmp_path / "model.keras")
    samples = np.ones((16, 4), np.float32)
    expected = model(samples)["logits"].numpy()
    for outputs, is_equal in ((expected, True), (expected + 1e-4, False)):
        apart, _ = command._difference("keras", tmp_path / "model.keras", samples, outputs, None, model)
        assert (apart < command.TOLERANCE) is is_equal


class Closed(keras.Model):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("form", "framework", "model", "reason"),
    [
        ("torch-export", "pytorch", Branching(), "GuardOnDataDependentSymNode: Could not guard on data-dependent expr"),
        ("onnx", "pytorch", SingularValues(), "DispatchError: No ONNX function found for .*aten._linalg_svd"),
        ("keras", "tensorflow", Closed(object()), "NotImplementedError: Object Closed was created by .*`get_config.."),
    ],
)
def test_the_reason_of_the_exporter_is_one_line(form, framework, model, reason, tmp_path, capfd):
    dataset = SimpleNamespace(input_shape=(4,), input_type="float32")
    trained = SimpleNamespace(description=SimpleNamespace(model="net.py:build", dataset=lambda: dataset))
    if framework == "tensorflow":
        model(np.zeros((1, 4), np.float32))
    with pytest.raises(UserError, match=f"--to {form} cannot export --model net.py:build: {reason}"):
        command._write(
            form, tmp_path / "out.keras", framework, SimpleNamespace(model=model), cast(Any, trained), scales=False
        )
    assert capfd.readouterr() == ("", "")


def test_a_network_of_one_framework_is_not_for_formats_of_the_other():
    trained = SimpleNamespace(description=SimpleNamespace(model="net.py:build", framework="pytorch"))
    with pytest.raises(UserError, match="--to keras is written by tensorflow, and the run's network is of pytorch"):
        command._framework(SimpleNamespace(to="keras", framework=None), cast(Any, trained))


def test_mistakes_are_one_line(digits, tmp_path, monkeypatch):
    train(
        "pytorch", "alone", 1, tmp_path / "text", "--model", "text-encoder", "--dataset", "text-topics", "--epochs", "1"
    )
    with pytest.raises(UserError, match="expected tokens from 0 to .*, as the run was trained on, received others"):
        text = allstep.load(tmp_path / "text")
        text.predict(np.full((1, *text.description.input_shape), -1))
    for words, expected in (
        ((digits, "--to", "keras", "--framework", "pytorch"), "--to keras is written by tensorflow, not by pytorch"),
        ((digits, "--to", "state-dict", "--with-preprocessing"), "--with-preprocessing needs a format with a graph"),
        ((tmp_path / "text", "--to", "onnx", "--with-preprocessing"), "--with-preprocessing is for numbers"),
        (
            (tmp_path / "text", "--to", "keras"),
            "--to keras cannot export --model text-encoder: .*layer Positions is not",
        ),
        ((tmp_path / "none", "--to", "onnx"), "expected a run, a checkpoint or a .safetensors file"),
        ((digits, "--to", "coreml"), "expected --to to be one of"),
    ):
        if "onnx" in words:
            need_packages("onnx", "onnxruntime", "onnxscript", "tf2onnx")
        with pytest.raises(UserError, match=expected):
            command.main([*map(str, words), *(() if "none" in str(words[0]) else ("--output", str(tmp_path / "out")))])
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="expected onnx for --to onnx, received an environment without it; run "):
        command.main([str(digits), "--to", "onnx", "--output", str(tmp_path / "out.onnx")])
    assert not (tmp_path / "out").exists()
