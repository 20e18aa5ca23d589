#!/bin/sh
# Run by `make setup`: finds a Python that works and has a supported version, and runs tools/setup_environment.py by it.
#   PYTHON=python3.12  builds the environment with that interpreter (default: keep .venv's own, else python3)
#   GPU=1, GPU=0       builds for GPUs or for CPUs (default: keep .venv's choice, else for GPUs if there is a driver)
set -eu
cd "$(dirname "$0")/.."

if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- .venv/bin/python python3 python3.13 python3.12 python3.11 python3.10
fi
for python in "$@"; do
    # The output is checked as well, since any program may exit with status 0.
    answer=$("$python" -c 'import sys; print("fits" if (3, 10) <= sys.version_info[:2] <= (3, 13) else "")' \
        2>/dev/null </dev/null) || continue
    if [ "$answer" = fits ]; then
        exec "$python" tools/setup_environment.py
    fi
done
echo "make setup: expected Python 3.10 to 3.13, received ${PYTHON:-python3}, which is missing or of another version;" \
    "install one (apt-get install python3 python3-venv python3-dev) or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 2
