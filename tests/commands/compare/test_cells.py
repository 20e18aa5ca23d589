"""Cells of a comparison, the command that launches each, and its rules."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compared import SETTINGS, cell

from allstep.commands.compare.cells import commands, matrix, unavailable
from allstep.commands.compare.measuring import gate_path, sample_path
from allstep.commands.compare.table import rules
from allstep.commands.shared import machine
from allstep.common.base.errors import UserError


def test_matrix_has_what_frameworks_have_and_what_the_others_are_compared_with():
    strategies = ["ddp", "parameter-server", "ddp"]
    what = ["cnn"], [64], ["float32"]
    cells = matrix(["real-strong"], ["pytorch", "tensorflow"], strategies, [2, 2], *what)
    assert [(one.framework, one.strategy, one.ranks) for one in cells] == [
        ("pytorch", "independent", 1),
        ("pytorch", "independent", 2),
        ("pytorch", "ddp", 1),
        ("pytorch", "ddp", 2),
        ("tensorflow", "independent", 1),
        ("tensorflow", "independent", 2),
        ("tensorflow", "parameter-server", 2),  # the parameter server needs at least two ranks
    ]
    assert len({one.id for one in cells}) == len(cells)


def test_compiled_steps_have_cells_of_strategies_that_can_beside_the_others():
    strategies = ["horovod", "data-parallel"]
    cells = matrix(["synthetic-weak"], ["pytorch"], strategies, [1], ["cnn"], [64], ["float32"], compilations=[0, 1])
    assert [(one.strategy, one.arithmetic) for one in cells] == [
        *((name, "float32") for name in ("independent", *strategies)),
        *((name, "float32, compiled") for name in ("independent", "horovod")),
    ]
    assert len({one.id for one in cells}) == len(cells) and len({one.ranking for one in cells}) == 2
    for one in cells:
        [command], _ = commands(one, SETTINGS, Path("at"))
        assert ("--compile" in command) == one.compiled


def test_a_network_of_ones_own_has_cells_and_files_as_others_have():
    models = ["a/b.py:build", "a-b.py:build", "timm:resnet18"]
    cells = matrix(["synthetic-weak"], ["pytorch"], ["horovod"], [1], models, [64], ["float32"])
    for find in (gate_path, lambda folder, name: sample_path(folder, name, 0).parent):
        paths = {find(Path("at"), one.id) for one in cells}
        assert len(paths) == len(cells) == 6 and {len(path.parts) for path in paths} == {3}
    [mine], _ = commands(cells[0], SETTINGS, Path("at"))
    [library], _ = commands(cells[-1], SETTINGS, Path("at"))
    assert mine[mine.index("--model") + 1] == "a/b.py:build" and library[library.index("--model") + 1] == models[-1]
    shapes = [words[words.index("--synthetic-shape") + 1 :][:3] for words in (mine, library)]
    assert shapes == [["28", "28", "1"], ["224", "224", "3"]]


def test_weak_scaling_keeps_the_batch_of_a_rank_and_strong_scaling_that_of_all():
    assert cell("synthetic-weak").global_batch_size == 128 and cell("synthetic-strong").global_batch_size == 64
    for workload, batch in (("real-weak", "64"), ("real-strong", "32")):
        both, outputs = commands(cell(workload, "independent"), SETTINGS, Path("at"), turns=Path("at/turns"))
        assert len(both) == len(outputs) == 2
        for command in both:
            assert command[command.index("--global-batch-size") + 1] == batch
            assert command[command.index("--strategy") + 1] == "single"
            assert command[command.index("--turns") + 1] == "at/turns"


def test_fewer_gpus_than_processes_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match="expected 2 GPUs for 2 processes, received CUDA_VISIBLE_DEVICES=3; list more"):
        commands(cell(strategy="independent"), replace(SETTINGS, device="cuda"), Path())


def test_each_of_several_independent_processes_has_a_gpu_of_its_own(monkeypatch):
    """Without a launcher, each process would take the first GPU."""
    for given, expected in ((None, ["0", "1"]), ("", ["0", "1"]), ("3,5,7", ["3", "5"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        launches, outputs = commands(cell(strategy="independent"), on_gpus := replace(SETTINGS, device="cuda"), Path())
        assert [one[:3] for one in launches] == [["env", f"CUDA_VISIBLE_DEVICES={gpu}", "python"] for gpu in expected]
        assert len(outputs) == 2
        for settings in (SETTINGS, on_gpus):
            [horovod], _ = commands(cell(), settings, Path())
            assert horovod[0] == "horovodrun" and horovod[horovod.index("--device") + 1] == settings.device


@pytest.mark.launch
def test_ranks_beyond_the_gpus_are_told():
    cells = [cell(strategy="independent", ranks=ranks) for ranks in (1, 2)]
    [(name, reason)] = unavailable(cells, oversubscribe=True, num_gpus=1)
    assert name == cells[1].id and "each of the 1 GPUs, received 2 ranks" in reason and "--device cpu" in reason


@pytest.mark.launch
def test_a_missing_launcher_is_told(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    cells = [cell(strategy="independent", ranks=1), cell(ranks=1), cell(strategy="independent", ranks=10_000)]
    reasons = dict(unavailable(cells))
    assert reasons.keys() == {cells[1].id, cells[2].id}
    assert "expected horovodrun" in reasons[cells[1].id] and "10000 ranks" in reasons[cells[2].id]
    assert "--oversubscribe" in reasons[cells[2].id]
    assert dict(unavailable(cells, oversubscribe=True)).keys() == {cells[1].id}


def test_the_rules_say_whether_ranks_share_cores():
    alone, shared = (" ".join(rules(SETTINGS, num_rounds=5, oversubscribe=shared)) for shared in (False, True))
    assert "--oversubscribe" in shared and "Each rank has a core" not in shared
    assert "--oversubscribe" not in alone and "Each rank has a core" in alone


def test_variables_that_matter_are_told_and_no_secret():
    environ = {
        **{"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"HOROVOD_SECRET_KEY": "x", "SLURM_JWT": "x", "TF_API_TOKEN": "x", "HOME": "x", "AWS_SESSION": "x"},
    }
    expected = {"CUDA_VISIBLE_DEVICES": "", "HOROVOD_CYCLE_TIME": "1", "OMP_NUM_THREADS": "1"}
    assert machine.variables(environ) == expected
