"""Words that exist where they are printed. Oracle: the two forms in docs/installation.md."""

from __future__ import annotations

import pytest

from allstep.common.base import checkout


@pytest.fixture(params=["checkout", "elsewhere"])
def here(request, monkeypatch, tmp_path):
    root = checkout.checkout()
    assert root  # the tests run from a checkout
    monkeypatch.chdir(root if request.param == "checkout" else tmp_path)
    return request.param


def test_trainers(here):
    words = {"checkout": ("pytorch/train.py",), "elsewhere": ("-m", "allstep.pytorch.train")}
    assert checkout.trainer("pytorch") == words[here]
    text = checkout.with_trainers_here("torchrun tensorflow/train.py")
    assert text == f"torchrun {' '.join(checkout.trainer('tensorflow'))}"


def test_a_checkout_s_environment_is_made_by_make_setup(monkeypatch):
    root = checkout.checkout()
    monkeypatch.setattr(checkout.sys, "prefix", str(root / ".venv"))
    assert checkout.setup_command() == "make setup"
    assert checkout.setup_command(gpu=True) == "make setup GPU=1"
    assert checkout.extra_command("pytorch") == "make setup"
    assert checkout.extra_command("mlflow") == "pip install 'allstep[mlflow]'"


def test_another_environment_gets_horovod_by_its_command(monkeypatch):
    monkeypatch.setattr(checkout.sys, "prefix", "/opt/conda")
    assert checkout.setup_command() == "allstep horovod install"
    assert checkout.setup_command(gpu=True) == "allstep horovod install --gpu"
    assert checkout.extra_command("pytorch") == "pip install 'allstep[pytorch]'"
