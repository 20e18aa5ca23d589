"""ResNets of PyTorch. Oracle: torchvision's modules, and batch norm by its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision

from allstep.common.recipe.weights import checksum, initial_weights
from allstep.pytorch.models import build_model, export_weights, import_weights
from allstep.pytorch.networks.batch_norm import BatchNorm
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm

NUM_PARAMETERS = {"resnet18": 11_689_512, "resnet50": 25_557_032}  # torchvision's documentation


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_is_torchvisions_network_by_the_same_names(name):
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name)
    weights = {of: array for of, array in export_weights(theirs).items() if "num_batches" not in of}
    ours = build_model(name, (64, 64, 3), 1000)
    import_weights(ours, weights)
    assert checksum(export_weights(ours)) == checksum(weights)
    assert sum(parameter.numel() for parameter in ours.parameters()) == NUM_PARAMETERS[name]
    for model in (theirs, ours):  # the second pass uses the statistics of the first
        model.train()
        with torch.no_grad():
            model(images(4, 3, 64, 64))
        model.eval()
    with torch.inference_mode():
        assert torch.equal(ours(images(2, 3, 64, 64)), theirs(images(2, 3, 64, 64)))


@pytest.mark.parametrize("image_shape", [(8, 8, 1), (9, 7, 2), (28, 28, 1), (1, 1, 3)])
def test_takes_images_of_any_size(image_shape):
    model = build_model("resnet18", image_shape, 7)
    height, width, channels = image_shape
    for num_samples in (3, 1):
        logits = model(images(num_samples, channels, height, width))
        assert logits.shape == (num_samples, 7) and logits.isfinite().all()
        logits.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_batch_norm_of_a_single_value_is_its_shift():
    """Oracle: the value is the mean and the variance is 0, each of which gets a weight of 0.1 in the statistics."""
    norm = BatchNorm(2)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([3.0, -1.0]))
    values = torch.tensor([5.0, 7.0]).view(1, 2, 1, 1)
    assert norm(values).flatten().tolist() == [3.0, -1.0]
    assert norm.running_mean.tolist() == pytest.approx([0.5, 0.7])
    assert norm.running_var.tolist() == pytest.approx([0.9, 0.9])


def test_running_variance_has_bessels_correction():
    norm, values = BatchNorm(3), images(4, 3, 2, 2)
    norm(values)
    expected = 0.9 + 0.1 * values.numpy().transpose(1, 0, 2, 3).reshape(3, -1).var(axis=1, ddof=1)
    np.testing.assert_allclose(norm.running_var.numpy(), expected, rtol=1e-6)


def test_statistics_of_all_ranks_fit_in():
    """--sync-batch-norm replaces each batch norm. Oracle: the same network without the flag, on a single rank."""
    model, alone = (build_model("resnet18", (8, 8, 1), 5) for _ in range(2))
    weights = initial_weights({of: array.shape for of, array in export_weights(alone).items()}, seed=0)
    for one in (model, alone):
        import_weights(one, weights)
    synchronise_batch_norm(model, lambda tensor, name: tensor, wanted=True)
    assert {type(module) for module in model.modules()}.isdisjoint({BatchNorm})
    values = images(6, 1, 8, 8)
    assert torch.allclose(model(values), alone(values), rtol=1e-4, atol=1e-4)
    assert not any(buffer.requires_grad for buffer in model.buffers())  # or buffers would keep all graphs
    ours, expected = export_weights(model), export_weights(alone)
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_initial_batch_norms_change_nothing():
    shapes = {name: (4,) for name in ("bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")}
    assert {name: array.tolist() for name, array in initial_weights(shapes, seed=3).items()} == {
        "bn1.weight": [1] * 4,
        "bn1.bias": [0] * 4,
        "bn1.running_mean": [0] * 4,
        "bn1.running_var": [1] * 4,
    }


@pytest.mark.parametrize("of_all_ranks", [False, True])
def test_gradients_of_two_shifts_are_two(of_all_ranks):
    """A shortcut's shift has the same gradient as the shift to which it is added. Their memory must be separate,
    because Horovod averages gradients in place and would do it twice."""
    norms = torch.nn.ModuleList([BatchNorm(3), BatchNorm(3)])
    if of_all_ranks:
        synchronise_batch_norm(norms, lambda tensor, name: tensor, wanted=True)
    values = images(1, 3, 1, 1)
    (norms[0](values) + norms[1](values)).sum().backward()
    gradients = [norm.bias.grad for norm in norms]
    assert gradients[0].data_ptr() != gradients[1].data_ptr() and torch.equal(*gradients)


def test_statistics_of_all_ranks_in_bfloat16():
    """The number of values is too large for bfloat16. Oracle: the same in float32."""
    values = images(257, 3, 2, 2)
    norms = [torch.nn.Sequential(BatchNorm(3)) for _ in range(2)]
    for norm in norms:
        synchronise_batch_norm(norm, lambda tensor, name: tensor, wanted=True)
    expected, received = norms[0](values), norms[1](values.bfloat16())
    assert received.dtype == torch.bfloat16
    assert torch.allclose(received.float(), expected, atol=3e-2)
    assert torch.allclose(norms[1][0].running_var, norms[0][0].running_var, rtol=1e-2)
