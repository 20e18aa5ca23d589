# Commands for users and developers. To choose the environment's Python: make setup PYTHON=python3.12; for GPUs: GPU=1.
.PHONY: setup train test test-quick lint docs bench soak horovod-wheel

# Runs a command with the programs of the environment, whether it is activated or not.
IN_VENV = PATH="$(CURDIR)/.venv/bin:$$PATH"

setup:
	@tools/setup.sh

train: setup
	$(IN_VENV) horovodrun -np 2 python pytorch/train.py
	$(IN_VENV) horovodrun -np 2 python tensorflow/train.py

test: setup
	$(IN_VENV) python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --warm

test-quick: setup
	$(IN_VENV) python -m pytest -n 2 --dist worksteal -m "not launch and not full and not slow"

lint: setup
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright  # pinned, so it need not look for newer versions

# The site in build/site; pip finds nothing to do, and needs no network, once the packages are there.
docs: setup
	$(IN_VENV) python -m pip install -q --disable-pip-version-check -r docs/requirements.txt
	$(IN_VENV) python -m sphinx -q -W --keep-going docs build/site

bench: setup
	$(IN_VENV) python -m allstep.benchmarks.overhead

soak: setup
	$(IN_VENV) allstep soak

horovod-wheel: setup
	$(IN_VENV) allstep horovod install --wheel-dir dist
