"""What can be shown on a GPU alone; `tools/gpu_check.sh` runs it."""
