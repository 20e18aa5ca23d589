"""Long commands of an installation, such as pip: each line goes to a log, a short progress line to the terminal."""

import errno
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from allstep.common.base.errors import UserError

LOG_TAIL_LINES = 30
GUARDED = """
exec 3<&0 </dev/null
(read -r line <&3; kill -KILL 0) >/dev/null 2>&1 &
exec "$@" 3<&-
"""
"""Shell program that runs its arguments and kills its process group when the pipe at its standard input is closed."""


class CommandFailed(Exception):
    """A failed command; the message has the end of its log. The installation ends with exit status 1."""


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    progress: Callable[[str], str | None] = lambda line: None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    to_its_end: bool = False,
) -> None:
    """Run `command`, append its output to `log`, and print what `progress` returns for each line unless it is None.

    The command gets its own process group, which is killed upon an interruption and when this process is killed, so
    that no compiler is left running. A short command that goes `to_its_end` ends by itself even then; it shows no
    progress. Raises UserError if the command failed because the disk is full or the package index does not answer;
    CommandFailed if it failed for another reason.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as log_file:
        start = log_file.tell()
        print("$", *command, file=log_file, flush=True)
        process = subprocess.Popen(
            command if to_its_end else ["sh", "-c", GUARDED, "sh", *command],
            stdin=subprocess.DEVNULL if to_its_end else subprocess.PIPE,
            stdout=log_file if to_its_end else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            shown = _show_progress(process, log_file, progress) if process.stdout else None
            process.wait()
        finally:
            if process.stdin:
                process.stdin.close()
            process.wait()
    if shown and sys.stdout.isatty():
        print()
    if process.returncode != 0:
        output = log.read_bytes()[start:].decode(errors="replace")
        if cause := diagnosis(output):
            raise UserError(f"{cause}; the whole log is {log}")
        tail = "\n".join("    " + line for line in output.splitlines()[-LOG_TAIL_LINES:])
        name = Path(command[0]).name
        raise CommandFailed(f"{tail}\n{name} ended with status {process.returncode}; the whole log is {log}")


def diagnosis(output: str) -> str | None:
    """Return what the machine lacks, in one line, if the output of a failed command shows that as the reason."""
    if os.strerror(errno.ENOSPC) in output:
        return "expected room on the disk, received a full one; free some, and run it again"
    # pip's last line only names the package that was not found; many lines before it give the reason.
    if package := re.search(r"No matching distribution found for (\S+)", output):
        _, broken, reasons = output.partition("connection broken by")
        reason = re.search(r"\[Errno -?\d+\] [^'\")]+|timed out", reasons)
        unreached = f"none that answers{f' ({reason[0]})' if reason else ''}"
        received = unreached if broken else "one without it"
        return (
            f"expected a package index that has {package[1]}, received {received}; check the network, or pip's "
            "settings for an index or a proxy"
        )
    return None


def _show_progress(process: subprocess.Popen, log_file, progress: Callable[[str], str | None]) -> str | None:
    """Copy the output to the log, and print progress: on a terminal in one changing line, else in one line per text."""
    shown = None
    for line in process.stdout or ():
        log_file.write(line)
        log_file.flush()
        text = progress(line.rstrip())
        if text is None or text == shown:
            continue
        shown = text
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 3
            print(f"\r\033[K  {text[:width]}", end="", flush=True)
        else:
            print(f"  {text}", flush=True)
    return shown


def pip_command(python: Path) -> list[str]:
    """Return the words that run pip for `python`: its own pip, else the one that Python itself bundles.

    Raises UserError if there is neither.
    """
    has_pip = subprocess.run([python, "-c", "import pip"], capture_output=True, cwd="/").returncode == 0
    words = [str(python), "-m", "pip"] if has_pip else [str(python), f"{_bundled_pip()}/pip"]
    return [*words, "--disable-pip-version-check", "--no-input"]


def _bundled_pip() -> Path:
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    wheels = sorted(Path(folder).glob("pip-*.whl"))
    if not wheels:
        raise UserError(
            f"expected pip in {sys.prefix}, received none, and Python bundles none; install it: uv pip install pip"
        )
    return wheels[-1]


def pip(
    python: Path,
    *arguments: str,
    log: Path,
    progress: Callable[[str], str | None] = lambda line: None,
    env: Mapping[str, str] | None = None,
    to_its_end: bool = False,
) -> None:
    """Run pip with these arguments; its output goes to the log. It raises as `run_logged` does.

    `progress` and `to_its_end` are those of `run_logged`; what waits for the package index is told in any case.
    """
    env = {**os.environ, **(env or {})}
    # Variables that would put packages elsewhere than where the caller wants them.
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"):
        env.pop(name, None)

    def told(line: str) -> str | None:
        if "after connection broken by" in line:
            return "the package index does not answer; pip tries again"
        return progress(line)

    command = [*pip_command(python), *arguments]
    run_logged(command, log, progress=told, env=env, cwd=Path("/"), to_its_end=to_its_end)
