"""Hooks on real ranks; `test_training_run.py` has their moments."""

from __future__ import annotations

import re

from ranks import REPOSITORY, launch

FLAGS = ("--dataset", "synthetic", "--synthetic-samples", 64, "--global-batch-size", 32, "--checkpoint-every", 1)


def test_the_program_on_the_page(tmp_path):
    script = tmp_path / "page.py"
    page = (REPOSITORY / "docs" / "five-steps.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script.write_text(program)
    result = launch("horovodrun-gloo", 2, script, *FLAGS, "--epochs", 2, "--output-dir", tmp_path / "run")
    assert result.returncode == 0 and re.findall(r"epoch .*", result.output) == [
        "epoch 1 ended at step 2",
        "epoch 2 ended at step 4",
    ], result.output
