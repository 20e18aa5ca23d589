"""No exception of an observer reaches the script. Oracle: the losses of the script without faults in the hooks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from ranks import REPOSITORY, run

_PROGRAM = Path(__file__).parent / "programs" / "faulty_observers.py"
_OBSERVERS = REPOSITORY / "commands" / "prove" / "observer"


def _train(when: str, folder: Path) -> dict:
    folder.mkdir()
    result = run("python", _PROGRAM, when, folder)
    assert result.returncode == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.launch
def test_hooks_that_fail_leave_the_script_alone(tmp_path):
    """Each hook fails before the call that it observes, and then after it."""
    right = _train("never", tmp_path / "never")
    assert right["unseen"] == []
    assert "torch.distributed.optim" not in right["imported"]  # it is slow to import, and the script has not done so
    for when in ("before", "after"):
        faulty = _train(when, tmp_path / when)
        assert faulty["losses"] == right["losses"]
        assert set(faulty["unseen"]) >= {"calls of models", "steps of optimizers", "loops over loaders", "hvd.init"}
        assert faulty["unseen"] == faulty["hooks"]


def test_every_hook_is_guarded():
    """Hooks are replaced through the guard, except the few that have to end a loop or to know the outermost call."""
    unguarded = []
    for path in sorted(_OBSERVERS.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("replace", "replace_everywhere"):
                made = ast.unparse(call.args[-1])
                if "around(" not in made and made not in ("make", "partial"):
                    unguarded.append((path.name, made))
    assert unguarded == [
        ("keras_fit.py", "wrap_enumerate"),
        ("pytorch_data.py", "wrap_next"),
        ("pytorch_models.py", "models.wrap_call"),
    ]
