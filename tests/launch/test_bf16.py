"""Gradients that travel as bfloat16 under Horovod. Oracles: the sums by hand; the curve without compression."""

from __future__ import annotations

import pytest
from jobs import HOROVODRUN_GLOO
from ranks import BIN, REPOSITORY, events, full, run, train

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE

FRAMEWORKS = ["pytorch", full("tensorflow")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sums_are_rounded_once(framework):
    result = run(*HOROVODRUN_GLOO, 3, BIN / "python", REPOSITORY / "tests/launch/programs/bf16_sums.py", framework)
    assert result.stdout.count("as by hand") == 3, result.output


@pytest.mark.parametrize("framework", ["tensorflow", full("pytorch")])
def test_trains_nearly_as_without(framework, tmp_path):
    """Equal curves would say that nothing was rounded."""
    flags = ("--model", "mlp", "--epochs", 1, "--log-every", 1, "--global-batch-size", 64, "--accumulate-steps", 2)
    train(framework, "horovodrun-gloo", 2, tmp_path / "bf16", *flags, "--compression", "bf16")
    train(framework, "alone", 1, tmp_path / "alone", *flags)
    bf16, plain = (
        [one["loss"] for one in events(tmp_path / name) if one["event"] == "step"] for name in ("bf16", "alone")
    )
    assert bf16 == pytest.approx(plain, rel=1e-3) and bf16 != pytest.approx(plain, rel=1e-6)


def test_adasum_has_none():
    with pytest.raises(UserError, match="--compression bf16 needs --op average or sum, received adasum"):
        parse(("horovod",), ALONE, ["--strategy", "horovod", "--compression", "bf16", "--op", "adasum"])
