"""The layout that the import names rely on (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from assignments import foreign_assignments, programs

REPOSITORY = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("pytorch", "tensorflow")


def python_files(framework: str) -> set[str]:
    return {path.name for path in (REPOSITORY / framework).glob("*.py")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_init_at_the_top(framework):
    """The repository root is on the path, so tensorflow/__init__.py would be imported as tensorflow."""
    assert not (REPOSITORY / framework / "__init__.py").exists()


def test_no_file_bears_a_package_s_name():
    """`python tensorflow/train.py` puts tensorflow/ first on the path: a horovod.py there would shadow the package."""
    names = {path.stem for framework in FRAMEWORKS for path in (REPOSITORY / framework).glob("*.py")}
    names |= {path.parent.name for framework in FRAMEWORKS for path in (REPOSITORY / framework).glob("*/*.py")}
    assert not names & {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names}


def test_both_frameworks_have_the_same_files():
    """Exceptions: the drop-in, since Keras under Horovod needs what PyTorch has from Horovod itself, and the decoder of
    JPEG files on GPUs, which TensorFlow does not have."""
    drop_in = {name for name in python_files("tensorflow") if name.startswith("horovod_")}
    assert python_files("pytorch") - {"jpeg_decoding.py"} == (
        python_files("tensorflow") - {"derived_state.py"} - drop_in
    )


def test_both_frameworks_have_horovod_and_single():
    for framework in FRAMEWORKS:
        for name in ("__init__.py", "strategy.py", "horovod.py"):
            assert (REPOSITORY / framework / "strategies" / name).exists()


def functions(file: str, name: str) -> list[ast.FunctionDef]:
    """Return the methods of the class whose name ends like that."""
    tree = ast.parse((REPOSITORY / file).read_text())
    [found] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(name))
    return [node for node in found.body if isinstance(node, ast.FunctionDef)]


def strategy_methods(file: str) -> list[str]:
    names = [function.name for function in functions(file, "Strategy")]
    return [name for name in names if not name.startswith("_")]


def test_the_step_of_both_frameworks_reads_the_same():
    """The same parts, given by the same names, and the same moments for observers, in the same order."""
    parts, moments = (
        [
            [argument.arg for argument in functions(f"{framework}/step.py", "Step")[0].args.kwonlyargs]
            for framework in FRAMEWORKS
        ],
        [[one.name for one in functions(f"{framework}/observer.py", "Observer")] for framework in FRAMEWORKS],
    )
    assert parts[0] == parts[1] == ["backward", "reduction", "precision", "changes", "observers"]
    common = [name for name in moments[0] if name in moments[1]]
    assert common == [name for name in moments[1] if name in moments[0]]
    assert {"begin", "see_averages", "see_updates", "end", "exchange_weights"} <= set(common)


# A step of TensorFlow is one traced function; one of PyTorch consists of passes whose gradients are reduced in buckets.
OF_ONE_FRAMEWORK = {
    *("bucket_megabytes", "eval_pass", "overflowed_anywhere"),
    *("compile_train_step", "compile_eval_step", "unless"),
}


def test_strategies_of_both_frameworks_have_the_same_methods():
    steps = strategy_methods("common/training/strategy.py")
    assert [name for name in steps if name in ("init", "pin_device", "wrap", "broadcast")] == [
        *("init", "pin_device", "wrap", "broadcast")
    ]
    methods, others = (
        [name for name in strategy_methods(f"{framework}/strategies/strategy.py") if name not in OF_ONE_FRAMEWORK]
        for framework in FRAMEWORKS
    )
    assert [name for name in methods if name not in steps] == [name for name in others if name not in steps]
    assert "compiled" in methods


# Files that may assign to another module, and why.
ASSIGNED = {
    "commands/prove/observer/observer.py": "a script is observed by hooks in what it calls, in its own ranks alone",
    "common/catalog/user_modules.py": "a user's file sees its own folder and arguments alone",
    "common/launch/rendezvous.py": "mpi4py is configured by the attributes of mpi4py.rc",
    "pytorch/compat.py": "torch.compile is configured by the attributes of torch._dynamo.config",
    "pytorch/numerics.py": "torch is configured by the attributes of torch.backends and torch.utils",
    "tensorflow/compat.py": "the drop-in for horovod.keras teaches Keras' functions of distributed optimizers",
    "tests/common/process/test_output.py": "a process of its own stands for a rank whose launcher is gone",
    "tests/conftest.py": "an end of the process by code under test is told",
    "tests/tools/test_layout.py": "what the search must find",
    "tests/warm/warm_server.py": "a fork takes the arguments of the program that it runs",
}
PARTS = ("common", "pytorch", "tensorflow", "commands", "benchmarks", "examples", "tests")


def test_nobody_changes_another_module():
    """The rule covers the source and the tests' programs; pytest's monkeypatch restores its changes."""
    found = {
        f"{path.relative_to(REPOSITORY)}: {assignment}"
        for part in PARTS
        for path in (REPOSITORY / part).rglob("*.py")
        for program in programs(ast.parse(path.read_text()))
        for assignment in foreign_assignments(program)
    }
    unexpected = {one for one in found if one.partition(":")[0] not in ASSIGNED}
    assert not unexpected
    assert {one.partition(":")[0] for one in found} == set(ASSIGNED)  # no exception is unused


@pytest.mark.parametrize(
    "program",
    [
        "from allstep.common import run\nrun.train = print",
        "from allstep.pytorch import worker\ndef f():\n    worker.Worker.train_step = print",
        "import importlib\nkind = importlib.import_module('a').Worker\nkind.train_step = print",
        "import sys\nsys.argv[1:] = []",
        "import sys\nfirst, *sys.argv[1:] = sys.argv",
        "import a.b\na.b.c += 1",
        "import a\nsetattr(a, 'b', 1)",
        "import a\ndel a.b",
        "PROGRAM = 'from a import {name}\\n{name}.b = 1'",
    ],
)
def test_the_search_for_changes_finds(program):
    assert [one for tree in programs(ast.parse(program)) for one in foreign_assignments(tree)]


def test_make_test_runs_every_test(pytestconfig):
    paths = [REPOSITORY / path for path in pytestconfig.getini("testpaths")]
    files = (REPOSITORY / "tests").rglob("test_*.py")
    assert [file for file in files if not any(file.is_relative_to(path) for path in paths)] == []


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {
        "allstep." + ".".join(path.parent.relative_to(REPOSITORY).parts)
        for top in ("common", "pytorch", "tensorflow", "commands", "benchmarks")
        for path in (REPOSITORY / top).rglob("*.py")
        if "patches" not in path.parts  # data of allstep.commands.horovod
    }
    assert listed == {"allstep", *found}


def test_the_links_are_those_of_the_packages():
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    folders = dict(re.findall(r"allstep\.(\w+) = (\w+)", config["options"]["package_dir"]))
    links = {link.name: link.resolve() for link in (REPOSITORY / "tools/editor/allstep").iterdir()}
    assert links == {name: REPOSITORY / folder for name, folder in folders.items()}


@pytest.mark.parametrize("with_links", [True, False])
def test_pyright_resolves_our_imports_in_a_checkout_of_any_name(with_links, tmp_path):
    """Control: without the links it resolves none, though allstep can be imported."""
    checkout = tmp_path / "elsewhere"
    shutil.copytree(REPOSITORY / "common", checkout / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    if with_links:
        shutil.copytree(REPOSITORY / "tools/editor", checkout / "tools/editor", symlinks=True)
    command = [str(Path(sys.prefix, "bin", "pyright")), "--outputjson", "--pythonpath", sys.executable]
    result = subprocess.run([*command, "common/training/hooks.py"], cwd=checkout, capture_output=True, text=True)
    rules = [found.get("rule") for found in json.loads(result.stdout)["generalDiagnostics"]]
    assert rules == ([] if with_links else ["reportMissingImports"])


def ruff(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess:
    command = [str(Path(sys.prefix, "bin", "ruff")), "check", "--select", "TID251", "--no-cache", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, input=stdin, capture_output=True, text=True)


def test_common_imports_no_framework():
    result = ruff("common")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_help_is_there_without_numpy(framework):
    """The help, and the error of a wrong flag, take 0.1 s."""
    command = [sys.executable, "-X", "importtime", f"{framework}/train.py", "--help"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "allstep.common.base.flag_types" in imported
    assert not imported & {"numpy", "torch", "tensorflow"}


@pytest.mark.parametrize("module", ["torch", "tensorflow", "keras", "horovod.torch"])
def test_the_guard_of_common_works(module):
    program = f"def f():\n    import {module}\n"
    assert ruff("--stdin-filename", "common/example.py", "-", stdin=program).returncode == 1
    assert ruff("--stdin-filename", "pytorch/example.py", "-", stdin=program).returncode == 0
