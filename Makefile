# Everything a newcomer needs: `make demo` and `make test` set up what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is installed first and by exact version: a looser pin would fetch a CUDA build of several GB.
TORCH := torch==2.13.0

.PHONY: setup demo test test-slow lint soak clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml scheduler_svc/_rows.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/phalanx demo

# Two at a time, with one thread each. Tests that start real processes go file by file, since those of a file share a node; those that
# compare with a time have the machine to themselves.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q -n 2 --dist worksteal -m 'not process and not slow and not soak'
	$(BIN)/python -P -m pytest -q -n 2 --dist loadfile -m 'process and not timed and not slow and not soak'
	$(BIN)/python -P -m pytest -q -m 'timed and not slow and not soak'

test-slow: setup
	$(BIN)/python -P -m pytest -q -m slow

# 100,000 requests through the simulated schedulers, 10,000 lives of the whole simulated system under faults, then
# every test that takes minutes, on all processors (`JOBS=4`: on four). It ends with a summary; stopped and started again it goes on.
# `SOAK="--seconds 3600"`, and what else `python -P tests/soak.py --help` has.
soak: setup
	$(BIN)/python -P tests/soak.py $(if $(JOBS),--jobs $(JOBS)) $(SOAK)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
