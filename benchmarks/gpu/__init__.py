"""Checks that need a GPU; `tools/gpu_check.sh` runs them."""
