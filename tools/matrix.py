#!/usr/bin/env python3
"""Install allstep and build Horovod beside pairs of frameworks, train by each strategy, and write docs/matrix.md.

    tools/matrix.py FOLDER                                # all rows of the table, which takes hours
    tools/matrix.py FOLDER 3.10,2.9,2.19 3.12,2.11,-      # Python, PyTorch, TensorFlow; - is none
    tools/matrix.py FOLDER --newest                       # the newest that the index has; writes no table

FOLDER holds one environment at a time, and the logs. Interpreters are python3.N on the PATH, allstep is the last
commit, and uv installs packages if it is there. All runs of a row have one seed and one global batch size, so their
losses must agree. Status 1 upon a failure.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = REPOSITORY / "docs" / "matrix.md"
COLUMNS = ("install", "MPI", "Gloo", "ddp", "fsdp", "mirrored", "fit")
TRAIN = ("--epochs", "2", "--seed", "1", "--global-batch-size", "64")
MAX_LOSS_DIFFERENCE = 0.002  # losses are printed with three digits
MIN_FIT_ACCURACY = 0.9
TIMEOUT_S = 4 * 3600
DISTRIBUTIONS = ("torch", "tensorflow-cpu")
VERSIONS = """
import importlib.metadata as m, platform, sys
print(platform.python_version(), *(m.version(name) if name != "-" else name for name in sys.argv[1:]))
"""
NEWEST = "newest"

Key = tuple[str, str, str]
"""Versions of Python, PyTorch and TensorFlow; - is none."""


def try_row(key: Key, folder: Path) -> tuple[Key, dict[str, str]]:
    """Return the exact versions of an environment, and by column `yes`, or the runs that failed."""
    environment, logs = folder / "environment", folder / "-".join(key)
    for path in (environment, logs):
        shutil.rmtree(path, ignore_errors=True)
    logs.mkdir(parents=True)
    results: dict[str, str] = {}
    losses: list[float] = []

    def run(column: str, name: str, *command: str) -> None:
        failure = failure_of(command, environment, logs / f"{name}.log", losses)
        results[column] = "; ".join(filter(None, [results.get(column, "").replace("yes", ""), failure])) or "yes"

    try:
        create(environment, key[0])
        python = str(environment / "bin" / "python")
        pip = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
        run("install", "packages", *pip, *requirements(key), str(folder / "allstep.tar.gz"))
        exact = exact_versions(key, environment) if results["install"] == "yes" else key
        if results["install"] == "yes":
            run("install", "horovod", "allstep", "horovod", "install")
        if results["install"] == "yes":
            for launch in launches(key):
                run(*launch)
        return exact, results
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def create(environment: Path, python: str) -> None:
    interpreter = sys.executable if python == platform.python_version() else f"python{python}"
    subprocess.run([interpreter, "-m", "venv", environment], check=True)


def requirements(key: Key) -> list[str]:
    named = zip(DISTRIBUTIONS, key[1:], strict=True)
    return [name if version == NEWEST else f"{name}=={version}.*" for name, version in named if version != "-"]


def exact_versions(key: Key, environment: Path) -> Key:
    names = [name if version != "-" else "-" for name, version in zip(DISTRIBUTIONS, key[1:], strict=True)]
    command = [environment / "bin" / "python", "-c", VERSIONS, *names]
    python, torch, tensorflow = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return python, torch, tensorflow


def launches(key: Key) -> list[tuple[str, ...]]:
    """Return column, name and command of each run on two ranks or devices."""
    horovodrun, torchrun = ("horovodrun", "-np", "2"), ("torchrun", "--standalone", "--nproc-per-node", "2")
    found: list[tuple[str, ...]] = []
    for framework, version in zip(("pytorch", "tensorflow"), key[1:], strict=True):
        if version != "-":
            train = ("python", "-m", f"allstep.{framework}.train", *TRAIN)
            found += [("MPI", f"mpi-{framework}", *horovodrun, "--mpi", *train)]
            found += [("Gloo", f"gloo-{framework}", *horovodrun, "--gloo", *train)]
    if key[1] != "-":
        for strategy in ("ddp", "fsdp"):
            found += [(strategy, strategy, *torchrun, "-m", "allstep.pytorch.train", *TRAIN, "--strategy", strategy)]
    if key[2] != "-":
        mirrored = ("--strategy", "mirrored", "--num-devices", "2")
        found += [("mirrored", "mirrored", "python", "-m", "allstep.tensorflow.train", *TRAIN, *mirrored)]
        found += [("fit", "fit", *horovodrun, "python", str(REPOSITORY / "examples" / "keras_fit.py"))]
    return found


def failure_of(command: tuple[str, ...], environment: Path, log: Path, losses: list[float]) -> str:
    """Run a command in an environment, tell the result, and return what is wrong with it; empty if nothing is.

    Args:
        losses: validation losses of the earlier runs of the trainers, to which this one's is added.
    """
    env = {**os.environ, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    with log.open("w") as output:
        try:
            run = subprocess.run(command, cwd=log.parent, env=env, stdout=output, stderr=output, timeout=TIMEOUT_S)
            reason = f"status {run.returncode}" if run.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"no end in {TIMEOUT_S} s"
    text = log.read_text(errors="replace")
    if not reason and "install" not in command:
        reason = wrong_figure(text, losses)
    seconds, last = time.monotonic() - start, text.strip().rpartition("\n")[2]
    print(f"{'FAILED' if reason else 'ok'}: {log.stem} in {seconds:.0f} s", f"{reason}: {last} ({log})" * bool(reason))
    sys.stdout.flush()
    return f"{log.stem}: {reason}" if reason else ""


def wrong_figure(text: str, losses: list[float]) -> str:
    """Return what is wrong with the last loss or accuracy that a run has printed; empty if nothing is."""
    if found := re.findall(r"Validation Loss = ([\d.]+)", text):
        losses.append(float(found[-1]))
        return "" if abs(losses[-1] - losses[0]) <= MAX_LOSS_DIFFERENCE else f"loss {losses[-1]}, not {losses[0]}"
    found = re.findall(r"validation accuracy: ([\d.]+)", text)
    return "" if found and float(found[-1]) >= MIN_FIT_ACCURACY else f"accuracy {found[-1] if found else 'not printed'}"


def read_table() -> list[tuple[Key, list[str]]]:
    """Return the rows of the page: versions, and the other cells."""
    lines = re.findall(r"^\| (3\.\S+) \| (\S+) \| (\S+) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    return [((python, torch, tensorflow), rest.split(" | ")) for python, torch, tensorflow, rest in lines]


def short(key: Key) -> Key:
    """Return versions with two numbers each."""
    python, torch, tensorflow = (".".join(version.split(".")[:2]) for version in key)
    return python, torch, tensorflow


def write_row(exact: Key, results: dict[str, str]) -> None:
    """Replace the row of the page with these versions."""
    cells = [results.get(column, "-") for column in COLUMNS]
    line = f"| {' | '.join([*exact, *cells, time.strftime('%Y-%m-%d')])} |"
    old = next(f"| {' | '.join([*key, *rest])} |" for key, rest in read_table() if short(key) == short(exact))
    TABLE.write_text(TABLE.read_text().replace(old, line))


def main(folder: Path, *words: str) -> None:
    keys = [short(key) for key, _ in read_table()]
    if newest := words == ("--newest",):
        chosen: list[Key] = [(platform.python_version(), NEWEST, NEWEST)]
    else:
        chosen = [key for key in keys if not words or ",".join(key) in words]
        if unknown := set(words) - {",".join(key) for key in keys}:
            sys.exit(f"expected rows of {TABLE}, received {' '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    archive = ["git", "archive", "--prefix", "allstep/", "--output", str(folder / "allstep.tar.gz"), "HEAD"]
    subprocess.run(archive, cwd=REPOSITORY, check=True)
    failed = False
    for key in chosen:
        print(*key, flush=True)
        exact, results = try_row(key, folder)
        print(*exact, flush=True)
        failed |= any(result != "yes" for result in results.values())
        if not newest:
            write_row(exact, results)
    sys.exit(failed)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
