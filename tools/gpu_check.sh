#!/bin/sh
# What the project promises of GPUs, measured on this machine's first one: figure, bound, reached; status 1 where one is
# missed. Needs `make setup GPU=1` and no network; takes at most 8 minutes. `tools/gpu_check.sh --help` says the rest.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export PATH CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
exec python -m allstep.benchmarks.gpu.check "$@"
