#!/bin/sh
# What `make setup` runs: finds a Python that starts and fits, then hands over to tools/setup_environment.py.
#   PYTHON=python3.12  builds the environment with that interpreter (default: keep .venv's own, else python3)
#   GPU=1, GPU=0       builds for GPUs or for CPUs (default: keep .venv's choice, else for GPUs where a driver is)
set -eu
cd "$(dirname "$0")/.."

if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- .venv/bin/python python3 python3.13 python3.12 python3.11 python3.10
fi
for python in "$@"; do
    # It must say so: a status of 0 alone is what any program may end with.
    answer=$("$python" -c 'import sys; print("fits" if (3, 10) <= sys.version_info[:2] <= (3, 13) else "")' \
        2>/dev/null </dev/null) || continue
    if [ "$answer" = fits ]; then
        exec "$python" tools/setup_environment.py
    fi
done
echo "make setup: expected Python 3.10 to 3.13, received ${PYTHON:-python3}, which is missing or of another version;" \
    "install one (apt-get install python3 python3-venv python3-dev) or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 2
