"""The choice of devices. Oracle: the module's promise of a GPU for each rank if every rank of the host gets its own."""

from __future__ import annotations

import dataclasses

import pytest

from allstep.common.base.errors import UserError
from allstep.common.launch import versions
from allstep.common.launch.devices import check_agreement, choose_gpu, report_choice
from allstep.common.launch.placement import ALONE, Placement
from allstep.common.launch.versions import HorovodBuild, usable_gpus


def host(local_size: int, launcher: str = "horovodrun") -> list[Placement]:
    """Return the placements of a job's ranks on one host."""
    placement = dataclasses.replace(ALONE, launcher=launcher, world_size=local_size, local_size=local_size)
    return [dataclasses.replace(placement, rank=rank, local_rank=rank) for rank in range(local_size)]


def choices(
    wanted: str, local_size: int, num_gpus: int, environ: dict | None = None, **placement: str
) -> list[int | None]:
    return [choose_gpu(wanted, rank, num_gpus, environ or {}) for rank in host(local_size, **placement)]


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("local_size", [1, 2, 4, 8])
def test_every_rank_has_its_own_gpu_or_none_has(num_gpus, local_size):
    found = choices("auto", local_size, num_gpus)
    if local_size <= num_gpus:
        assert found == list(range(local_size)) == choices("cuda", local_size, num_gpus)
    else:
        assert found == [None] * local_size
        ranks, gpus = (f"{number} {what}{'s' * (number != 1)}" for number, what in
                       ((local_size, "rank"), (num_gpus, "GPU")))  # fmt: skip
        with pytest.raises(UserError, match=f"received {ranks} for {gpus} that .* --device cpu"):
            choices("cuda", local_size, num_gpus)
    assert choices("cpu", local_size, num_gpus) == [None] * local_size


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "gres:gpu:1"},
        {"SLURM_NTASKS_PER_GPU": "1"},
        {"SLURM_GPU_BIND": "single:1"},
        {"SLURM_TRES_BIND": "gres/gpu:per_task:1"},
    ],
    ids=str,
)
def test_a_gpu_that_slurm_gave_a_task_is_the_only_one_it_sees(environ):
    assert choices("auto", 4, 1, environ, launcher="srun") == [0] * 4
    assert choices("auto", 4, 1, {}, launcher="srun") == [None] * 4
    # Two tasks share a GPU, and other launchers assign none.
    assert choices("auto", 4, 1, {"SLURM_NTASKS_PER_GPU": "2"}, launcher="srun") == [None] * 4
    assert choices("auto", 4, 1, environ, launcher="mpirun") == [None] * 4


def test_auto_is_reported_once_where_there_was_a_choice(capsys):
    def reported(gpu: int | None, wanted: str, placement: Placement, num_gpus: int) -> str:
        report_choice(gpu, wanted, placement, num_gpus)
        return capsys.readouterr().err

    first, second = host(2)
    assert "on the CPU: 2 ranks of this host for 1 GPU, and each would need its own" in reported(None, "auto", first, 1)
    assert "training on GPUs, one for each rank" in reported(0, "auto", first, 2)
    assert reported(1, "auto", second, 2) == reported(None, "auto", first, 0) == reported(None, "cpu", first, 2) == ""


def test_hosts_that_differ_are_refused():
    for number in (0, 4):
        check_agreement(number, host(4)[0])
    with pytest.raises(UserError, match="expected GPUs for all 4 ranks or for none, received 3 ranks"):
        check_agreement(3, host(4)[0])


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_horovod_has_gpus_where_it_has_nccl(num_gpus, monkeypatch, capsys):
    first, second = host(2)
    for features in (("MPI", "NCCL"), ("MPI", "Gloo")):
        monkeypatch.setattr(versions, "read_build", lambda features=features: HorovodBuild({}, features))
        usable = num_gpus if "NCCL" in features else 0
        assert usable_gpus(num_gpus, "cpu", first) == num_gpus  # choose_gpu needs all of them
        assert usable_gpus(num_gpus, "auto", second) == usable and capsys.readouterr().err == ""
        assert usable_gpus(num_gpus, "auto", first) == usable
        assert ("Horovod is built for CPUs" in capsys.readouterr().err) == (num_gpus > usable)
        if num_gpus > usable:
            with pytest.raises(UserError, match="expected Horovod with NCCL .* GPU=1"):
                usable_gpus(num_gpus, "cuda", first)
