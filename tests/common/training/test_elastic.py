"""Commits, and elastic jobs on ranks in threads. Oracle: the undisturbed run, and the steps of the commits."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numpy_ranks import Group, Job, ThreadCollectives, of, train
from ranks import events

from allstep.common.base.errors import Fault, RanksLost, UserError
from allstep.common.checkpoint import load
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import ALONE
from allstep.common.training import elastic
from allstep.common.training.hooks import Hook
from allstep.common.training.saving import Commits
from allstep.common.watch import HOSTS_CHANGED

FLAGS = ("--slices", 4, "--epochs", 3, "--log-every", 1)  # 4 steps an epoch, the same bits on any number of ranks


class ElasticJob:
    """Job that is formed again from `sizes`, as its hosts leave and join.

    A process keeps its commits. The ranks with the highest numbers leave, or come late.
    """

    def __init__(self, output_dir: Path, sizes: list[int], *, commit_every: int, moments: dict[int, str]) -> None:
        """`moments`: by step, `lost` if the ranks lose one after that step, `hosts` if hosts join or leave."""
        self.sizes, self.moments = sizes, dict(moments)
        flags = ("--commit-every", commit_every, "--output-dir", output_dir, "--checkpoint-every", 0, *FLAGS)
        self.jobs = [Job(size, *flags, hooks=self._hooks) for size in sizes]
        for job in self.jobs:
            parallel = dataclasses.replace(job.config.parallel, elastic=True)
            job.config = dataclasses.replace(job.config, strategy="horovod", parallel=parallel)
        self._formed = [threading.Barrier(size) for size in sizes]

    def _hooks(self, job: Job, rank: int) -> list[Hook]:
        moments = self.moments if job is not self.jobs[-1] else {}

        class Moments(Hook):
            def on_step(self, session):
                moment = moments.get(session.progress.step)
                if moment:
                    session.worker.collectives.barrier()  # until all ranks are there
                if moment == "hosts" and rank == 0:
                    job.ask_to_stop(HOSTS_CHANGED)
                if moment:
                    session.worker.collectives.barrier()
                if moment == "lost":
                    raise RanksLost("a rank is gone")

        return [Moments()]

    def train_rank(self, rank: int) -> None:
        """Train as the process of this rank does, as long as it has a part in the job."""
        jobs = iter(zip(self.jobs, self._formed, strict=True))

        def build():
            job, formed = next((job, formed) for job, formed in jobs if rank < job.num_ranks)
            run = job.build(rank)
            formed.wait()
            return run

        with contextlib.suppress(StopIteration):  # where it has left the job
            elastic.train(self.jobs[0].config, build)

    def train(self) -> list[dict]:
        with ThreadPoolExecutor(max(self.sizes)) as pool:
            list(pool.map(self.train_rank, range(max(self.sizes))))
        return events(self.jobs[0].config.output.output_dir)


@pytest.fixture(autouse=True)
def without_a_process_that_watches(monkeypatch):
    """These threads are one process, which nothing suspends."""
    monkeypatch.setattr(elastic, "end_when_frozen", lambda seconds: None)


@pytest.mark.parametrize(
    ("sizes", "commit_every", "moments", "go_on_after"),
    [
        ([4, 2], 3, {9: "lost"}, [8]),
        ([4, 2], 3, {7: "lost"}, [6]),
        ([4, 3], 5, {2: "lost"}, []),
        ([2, 4], 100, {6: "hosts"}, [6]),
        ([3, 2], 100, {4: "hosts"}, [4]),
    ],
    ids=str,
)
def test_a_job_goes_on_with_other_ranks(sizes, commit_every, moments, go_on_after, tmp_path, capsys):
    """The newest commit may be an epoch's end. Each sample counts once, in the bits of one rank."""
    found = ElasticJob(tmp_path / "run", sizes, commit_every=commit_every, moments=moments).train()
    assert of("start", found, "world_size")[-1] == sizes[-1]
    said = [line for line in capsys.readouterr().err.splitlines() if "ranks go on after step" in line]
    assert said == [f"allstep: {sizes[-1]} ranks go on after step {step}" for step in go_on_after]
    expected = train(1, tmp_path / "undisturbed", *FLAGS)
    assert of("step", found, "step") == list(range(1, 13))
    assert of("step", found, "loss") == of("step", expected, "loss")
    assert of("end", found, "weights_checksum") == of("end", expected, "weights_checksum")


def test_the_newest_commit_is_saved_while_the_job_is_formed(tmp_path, capsys):
    """Steps 3 and 4 are committed; step 7 was, too, when the rank was lost."""
    ElasticJob(tmp_path, [2, 2], commit_every=7, moments={7: "lost"}).train()
    said = capsys.readouterr().err
    assert said.count("step 4 is saved while the job is formed again") == 1, said
    assert load(tmp_path / "checkpoints" / "step-00000004", tmp_path, warn=pytest.fail).progress.step == 4


def test_any_other_failure_ends_the_job(tmp_path):
    def fail(run):
        raise Fault("step 3 failed: OSError: lost the disk")

    job = Job(1, "--output-dir", tmp_path, prepare=fail)
    job.config = dataclasses.replace(job.config, strategy="horovod")
    with pytest.raises(Fault, match="lost the disk"):
        elastic.train(job.config, lambda: job.build(0))


def test_ranks_agree_on_the_newest_commit(tmp_path):
    """Rank 1 has that of step 8, rank 0 that of step 4, and rank 2, which is new, none."""
    train(1, tmp_path, "--epochs", 2, "--keep-checkpoints", 9)
    states = {step: load(tmp_path / "checkpoints" / f"step-{step:08d}", tmp_path, warn=print) for step in (4, 8)}
    group = Group(3)

    def agree(rank: int, step: int | None):
        commits = Commits(every=1)
        if step:
            commits.keep(states[step])
        assert commits.agree(ThreadCollectives(group, rank, 3)) is commits.newest
        return commits.newest

    with ThreadPoolExecutor(3) as pool:
        agreed = list(pool.map(agree, range(3), (4, 8, None)))
    for state in agreed:
        assert (state.progress, state.schedule, state.config) == (
            states[8].progress, states[8].schedule, states[8].config
        )  # fmt: skip
        assert all((state.arrays[name] == array).all() for name, array in states[8].arrays.items())


def test_a_commit_is_a_copy():
    run = Job(1, "--epochs", 1).build(0)
    run.commits = Commits(every=1)
    run.train()
    before = run.commits.newest.arrays["model/fc.bias"].copy()
    run.worker.weights["fc.bias"] += 1
    assert (run.commits.newest.arrays["model/fc.bias"] == before).all()


RESTARTING = dataclasses.replace(ALONE, launcher="torchrun")


@pytest.mark.parametrize(
    ("flags", "placement", "environ", "expected"),
    [
        ((), ALONE, {"HOROVOD_ELASTIC": "1"}, "expected --elastic in an elastic job"),
        (("--strategy", "horovod", "--elastic"), ALONE, {}, "expected an elastic job of horovodrun with --elastic"),
        (("--strategy", "ddp", "--elastic"), RESTARTING, {}, "expected torchrun with --max-restarts"),
        (("--strategy", "ddp", "--elastic"), ALONE, {"TORCHELASTIC_MAX_RESTARTS": "3"}, "expected torchrun with"),
        (("--strategy", "ddp", "--elastic"), RESTARTING, {"TORCHELASTIC_MAX_RESTARTS": "3"}, "expected --output-dir"),
        (("--strategy", "horovod", "--elastic"), ALONE, {"HOROVOD_ELASTIC": "1"}, "expected --global-batch-size"),
    ],
    ids=str,
)
def test_flag_and_launcher_that_do_not_fit(flags, placement, environ, expected):
    strategy = flags[1] if flags else "horovod"
    parallel = dataclasses.replace(TrainConfig().parallel, elastic="--elastic" in flags)
    config = dataclasses.replace(TrainConfig(), strategy=strategy, parallel=parallel)
    with pytest.raises(UserError, match=expected) as error:
        elastic.check(config, placement, environ)
    assert "\n" not in str(error.value)


def test_ranks_that_torchrun_restarts_resume_the_newest_checkpoint(tmp_path):
    config = Job(1, "--output-dir", tmp_path).config
    parallel = dataclasses.replace(config.parallel, elastic=True)
    config = dataclasses.replace(config, strategy="ddp", parallel=parallel)
    assert elastic.with_newest_checkpoint(config).output.resume == "auto"
