"""Networks of forecasts. Oracles: torchvision's modules, published sizes, torch's own order of gradients, Keras."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from allstep.commands.forecast.networks import known_networks, read_model, read_network, uniform
from allstep.common.base.errors import UserError

PROGRAM = Path(__file__).parent / "programs" / "user_networks.py"


def user_networks():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def test_networks_are_torchvisions():
    """Oracle: torchvision's modules, whose parameters are counted tensor by tensor."""
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    options = {"inception_v3": {"aux_logits": False, "init_weights": False}}
    resnets = ("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
    for name in (*resnets, "vgg16", "inception_v3"):
        with torch.device("meta"):
            theirs = [parameter.numel() for parameter in getattr(models, name)(**options.get(name, {})).parameters()]
        layers = iter(known_networks()[name].layers)
        assert sum(theirs) == known_networks()[name].num_parameters
        while theirs:
            layer = next(layers)
            of_layer, theirs = theirs[: layer.num_tensors], theirs[layer.num_tensors :]
            assert name == "inception_v3" or sum(of_layer) == layer.num_parameters, layer


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("bert-base", 110_106_428), ("bert-large", 336_226_108), ("gpt2", 124_439_808), ("llama-8b", 8_030_261_248)],
)
def test_published_sizes(name, num_parameters):
    """Oracles: Devlin et al. 2019 with its pre-training heads, Radford et al. 2019, the Llama 3 model card."""
    network = known_networks()[name]
    assert network.num_parameters == num_parameters
    assert network.layers[0].multiplications == 0 and network.layers[0].num_parameters > 0.05 * num_parameters


def test_a_network_known_by_its_size_alone_has_a_tail():
    assert [len(uniform(number).layers) for number in (1, 26_122, 1_000_003, 10**12)] == [1, 2, 50, 50]
    network = uniform(1_000_003)
    tailed = network.with_tail(0.2).with_tail(0.25)
    assert tailed.num_parameters == network.num_parameters and len(tailed.layers) == 51
    assert (tailed.layers[0].num_parameters, tailed.layers[0].multiplications) == (250_001, 0)
    known = known_networks()["resnet50"]
    assert known.with_tail(0.2) is known


def test_a_file_of_layers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("- [fc1, 1000]\n- [fc2, 10, 5.0, 1]\n")
    assert read_network(path).num_parameters == 1010
    for wrong in ("- 3", "[]", "- [fc1, -1]", "{"):
        path.write_text(wrong)
        with pytest.raises(UserError, match="YAML list"):
            read_network(path)


def test_a_users_network_has_the_tensors_and_the_order_of_torch():
    """Oracle: autograd's own order of gradients, and the sizes of its tensors."""
    torch = pytest.importorskip("torch")
    model = user_networks().convolutions((9, 9, 3), 10)
    sample = torch.zeros(2, 3, 9, 9)
    model(sample)
    order = []
    for name, tensor in model.named_parameters():
        tensor.register_post_accumulate_grad_hook(
            lambda one, name=name: order.append((name.split(".")[0], one.numel()))
        )
    model(sample).sum().backward()
    found = read_model(f"{PROGRAM}:convolutions", "pytorch", (9, 9, 3), 10)
    assert [layer.name for layer in reversed(found.layers)] == list(dict.fromkeys(name for name, _ in order))
    for layer in found.layers:
        sizes = [size for name, size in order if name == layer.name]
        assert (layer.num_parameters, layer.num_tensors) == (sum(sizes), len(sizes))
    # 4 x 4 positions, each with 8 filters of 27 weights; batch norm multiplies no matrix; then 128 inputs.
    assert [layer.multiplications for layer in found.layers] == [4 * 4 * 8 * 27, 0, 10 * 128]


def test_tied_and_frozen_weights_of_a_users_text():
    pytest.importorskip("torch")
    found = read_model(f"{PROGRAM}:text", "pytorch", (5,), 10)
    layers = {layer.name: layer for layer in found.layers}
    assert next(iter(layers)) == "tokens" and "frozen" not in layers
    assert (layers["tokens"].num_parameters, layers["tokens"].multiplications) == (800, 0)  # a look-up
    assert layers["output"].num_parameters == 100  # its bias: the matrix is counted where its gradient is ready
    attention = layers["block.self_attn"]
    assert attention.num_parameters == 3 * 8 * 9 + 8 * 9 and attention.multiplications == 5 * 4 * 64
    assert found.num_parameters == 800 + 100 + 288 + (8 * 16 + 16) + (16 * 8 + 8) + 4 * 8


def test_a_users_network_of_numbers():
    pytest.importorskip("torch")
    assert read_model(f"{PROGRAM}:numbers", "pytorch", (30,), 10).num_parameters == 310


def test_a_users_network_whose_call_is_its_own():
    """Oracle: torch lists the parameters; the root's own one is used last."""
    pytest.importorskip("torch")
    found = read_model(f"{PROGRAM}:scaled", "pytorch", (30,), 10)
    assert found.num_parameters == sum(one.numel() for one in user_networks().scaled((30,), 10).parameters())
    layers = [(layer.name, layer.num_parameters, layer.num_tensors) for layer in found.layers]
    assert layers == [("output", 310, 2), ("", 10, 1)]


def test_a_users_keras_network():
    """Oracle: Keras counts the weights that train."""
    pytest.importorskip("keras")
    model = user_networks().attention((5,), 10)
    found = read_model(f"{PROGRAM}:attention", "tensorflow", (5,), 10)
    assert found.num_parameters == sum(variable.numpy().size for variable in model.trainable_variables)
    layers = {layer.name.rstrip("_0123456789"): layer for layer in found.layers}
    assert list(layers) == ["embedding", "query", "key", "value", "attention_output", "dense"]
    assert layers["embedding"].multiplications == 0 and layers["dense"].multiplications == 10 * 40
    assert layers["query"].multiplications == 5 * 64  # at five positions


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("resnet50", "FILE.py:FUNCTION for --model"),
        ("/nosuch.py:build", "a Python file"),
        (f"{PROGRAM}:nothing", "a function nothing"),
        (f"{PROGRAM}:failing", "no such file"),
        (f"{PROGRAM}:weightless", "a network with weights that train"),
        (f"{PROGRAM}:attention", "a torch.nn.Module"),
    ],
)
def test_networks_that_cannot_be_used(word, message):
    pytest.importorskip("keras" if "attention" in word else "torch")
    with pytest.raises(UserError, match=message) as caught:
        read_model(word, "pytorch", (4, 4, 3), 10)
    assert "\n" not in str(caught.value)
