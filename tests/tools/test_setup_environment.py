"""Steps and record of `make setup`, with made-up steps. Oracle: the steps that ran."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import setup_environment
import setup_needs
import tensorflow_gpu
from setup_environment import Step, fingerprints, set_up

from allstep.commands.horovod.prerequisites import Driver

pytestmark = pytest.mark.launch


class Recipe:
    """Three steps, each with a text that it depends on; `ran` lists those that set_up() ran."""

    def __init__(self) -> None:
        self.texts = {"a": "1", "b": "1", "c": "1"}
        self.interrupt_in: str | None = None
        self.ran: list[str] = []

    def steps(self, *, gpu: bool) -> list[Step]:
        texts = self.texts.items()
        return [Step(name, f"{text} {gpu}", lambda name=name: self.run(name)) for name, text in texts]

    def run(self, name: str) -> None:
        self.ran.append(name)
        if name == self.interrupt_in:
            raise KeyboardInterrupt

    def set_up(self) -> list[str]:
        self.ran = []
        set_up()
        return self.ran


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    recipe = Recipe()
    monkeypatch.setattr(setup_environment, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(setup_environment, "RECORD", tmp_path / ".venv" / "allstep-setup.json")
    monkeypatch.setattr(setup_environment, "setup_steps", recipe.steps)
    # The test must not depend on this machine's GPU or free disk space.
    monkeypatch.setattr(setup_environment, "find_driver", lambda: Driver(False))
    monkeypatch.setattr(setup_needs, "check_disk", lambda folder, needed_gb: None)
    monkeypatch.delenv("GPU", raising=False)
    return recipe


def test_a_second_call_runs_nothing(recipe):
    assert recipe.set_up() == ["a", "b", "c"]
    assert recipe.set_up() == []


def test_a_changed_step_and_all_after_it_are_run(recipe):
    recipe.set_up()
    recipe.texts["b"] = "2"
    assert recipe.set_up() == ["b", "c"]
    assert recipe.set_up() == []


def test_an_interrupted_step_is_not_taken_as_done(recipe):
    recipe.set_up()
    recipe.texts["c"] = "2"
    recipe.interrupt_in = "c"
    with pytest.raises(KeyboardInterrupt):
        recipe.set_up()
    recipe.interrupt_in = None
    # Not even with the previous text, whose step has been overwritten.
    recipe.texts["c"] = "1"
    assert recipe.set_up() == ["c"]


def test_half_installed_packages_are_thrown_away(recipe):
    """The second step is pip's; after an interruption there the first, the environment itself, is run again."""
    recipe.interrupt_in = "b"
    with pytest.raises(KeyboardInterrupt):
        recipe.set_up()
    recipe.interrupt_in = None
    assert recipe.set_up() == ["a", "b", "c"]
    recipe.texts["b"] = "2"
    assert recipe.set_up() == ["b", "c"]


def test_the_choice_of_gpu_is_kept_until_another_is_made(recipe, monkeypatch):
    recipe.set_up()
    monkeypatch.setenv("GPU", "1")
    assert recipe.set_up() == ["a", "b", "c"]
    monkeypatch.delenv("GPU")
    assert recipe.set_up() == []
    monkeypatch.setenv("GPU", "0")
    assert recipe.set_up() == ["a", "b", "c"]


def test_a_machine_with_a_driver_gets_a_build_for_gpus(recipe, monkeypatch, capsys):
    monkeypatch.setattr(setup_environment, "find_driver", lambda: Driver(True, 580))
    recipe.set_up()
    assert setup_environment.recorded()["gpu"]
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(".venv will be for GPUs: NVIDIA's driver is here")
    assert "for GPUs" in last


def test_the_build_for_gpus_has_one_tensorflow_and_a_whole_compiler():
    """Oracle: the constraints; two TensorFlows in one environment would overwrite each other."""
    cpu, gpu = (setup_environment.packages(gpu=gpu).splitlines() for gpu in (False, True))
    assert set(cpu) - set(gpu) == {"tensorflow-cpu==2.21.0"}
    assert [line for line in gpu if line not in cpu and not line.startswith("#")] == [
        "cuda-toolkit[nvcc,cccl]==13.0.3.0"
    ]
    own = setup_environment.TENSORFLOW_GPU_CONSTRAINTS.read_text()
    assert "tensorflow==2.21.0\n" in own
    assert "nccl" not in own.replace("NCCL", "")
    titles = [[step.title for step in setup_environment.setup_steps(gpu=gpu)] for gpu in (False, True)]
    assert set(titles[1]) - set(titles[0]) == {"TensorFlow, with CUDA 12 of its own"}


def test_an_environment_for_gpus_is_not_made_of_one_for_cpus():
    cpu, gpu = (fingerprints(setup_environment.setup_steps(gpu=gpu)) for gpu in (False, True))
    assert cpu[0] != gpu[0]


def test_tensorflow_s_folder_leaves_nvidia_s_packages_a_namespace(tmp_path):
    """The folder looks as pip leaves it. Oracle: Python itself, with the .pth file."""
    site, folder = setup_needs.site_packages(tmp_path), tensorflow_gpu.folder(tmp_path)
    parts = [site / "nvidia" / "nccl", site / "nvidia" / "cudnn", folder / "nvidia" / "cudnn", folder / "bin"]
    libraries = [folder / "nvidia" / name / "lib" for name in ("cublas", "cusolver")]
    for part in (*parts, *libraries):
        part.mkdir(parents=True)
        (part / "own.py").touch()
    (libraries[1] / "libcusolver.so.11").touch()
    (folder / "nvidia" / "__init__.py").touch()
    (folder / "tensorflow.py").touch()
    tensorflow_gpu.tidy_and_link(tmp_path)
    program = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import tensorflow, nvidia.nccl.own, nvidia.cudnn.own, os\n"
        "print(tensorflow.__file__, nvidia.cudnn.own.__file__, sep='\\n')\n"
    )
    result = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert list(map(os.path.realpath, result.stdout.splitlines())) == [
        str(folder / "tensorflow.py"),
        str(site / "nvidia" / "cudnn" / "own.py"),
    ]
    assert (folder / "nvidia" / "nccl" / "own.py").samefile(site / "nvidia" / "nccl" / "own.py")
    assert (libraries[0] / "libcusolver.so.11").samefile(libraries[1] / "libcusolver.so.11")
    assert not (folder / "bin").exists()


def test_fingerprints_depend_on_the_order_and_the_bounds_of_texts():
    def prints(*texts: str) -> list[str]:
        return fingerprints([Step("step", text, lambda: None) for text in texts])

    assert prints("ab", "c") != prints("a", "bc")
    assert prints("a", "b")[0] == prints("a", "c")[0]
    assert prints("a", "b")[1] != prints("c", "b")[1]
