# make demo and make test need Python 3.11 or 3.12 with venv, and make; they make .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo notebooks notebooks-update test test-training test-rest test-modes test-plan peers plan-table test-all check format

demo: $(VENV)/installed
	$(BIN)/python -m disco_jax.data.scenes runs/demo/data
	$(BIN)/python train.py --config configs/demo.py --workdir runs/demo/run

# Executes them; with -update their new output is kept.
notebooks: $(VENV)/installed-dev
	$(BIN)/python notebooks/execute.py
notebooks-update: $(VENV)/installed-dev
	$(BIN)/python notebooks/execute.py --update

# In two halves, side by side with make --jobs=2.
test: test-training test-rest

TRAINING := tests/training tests/test_train_script.py
test-training: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(TRAINING)

test-rest: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(TRAINING:%=--ignore=%)

# Under the modes that jax and Flax are about to make their defaults.
test-modes: $(VENV)/installed-dev
	JAX_CUSTOM_VJP3=1 $(BIN)/python -m pytest tests/losses/test_exactness.py
	NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false $(BIN)/python -m pytest tests/models tests/training/test_step.py

# Memory on GPUs that are not there. Their plug-in lies apart: in .venv it would complain, at every start, of no GPU.
test-plan: $(VENV)/installed-plan
	PYTHONPATH=$(VENV)/plan $(BIN)/python -m pytest -k gpu

# Our imports and exports beside open_clip and transformers, on the demo's checkpoint too; installs torch (up to 6 GB).
peers: $(VENV)/installed-peers
	test -f runs/demo/run/report.png || $(MAKE) demo
	$(BIN)/python -m pytest tests/peers

# The README's table of what fits on such GPUs; takes some ten minutes on 2 cores.
plan-table: $(VENV)/installed-plan
	PYTHONPATH=$(VENV)/plan JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.plans

# Both supported Pythons; give their paths where they are not on PATH.
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
test-all:
	$(MAKE) test PYTHON=$(PYTHON311) VENV=.venv-3.11
	$(MAKE) test PYTHON=$(PYTHON312) VENV=.venv-3.12

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed-peers: $(VENV)/installed-dev
	$(BIN)/pip install --quiet --editable '.[dev,peers]'
	touch $@

$(VENV)/installed-plan: $(VENV)/installed-dev
	$(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/plan \
		$$($(BIN)/python -c 'import jax; print("jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}".format(jax.__version__))')
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "disco-jax needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(BIN)/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/installed
