#!/bin/sh
# Measures the project's claims about GPUs on this machine's first one: figure, bound, met or not; exit status 1 if one
# is missed. Needs `make setup GPU=1`, but no network; takes at most 8 minutes. See `tools/gpu_check.sh --help`.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export PATH CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
exec python -m allstep.benchmarks.gpu.check "$@"
