#!/bin/sh
# What `make setup` runs: finds a Python that starts and fits, then hands over to tools/setup_environment.py.
#   PYTHON=python3.12  builds the environment with that interpreter (default: keep .venv's own, else python3)
#   GPU=1              builds Horovod with NCCL, GPU=0 without (default: keep .venv's choice, else without)
set -eu
cd "$(dirname "$0")/.."

for python in ${PYTHON:-.venv/bin/python python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        exec "$python" tools/setup_environment.py
    fi
done
echo "make setup: needs Python 3.10 to 3.13, but ${PYTHON:-python3} is missing or of another version;" \
    "install one (apt-get install python3 python3-venv python3-dev) or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 2
