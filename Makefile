# Each target works on a fresh machine: it makes .venv and installs what it needs by plain pip, pinned.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
export PYTHONHASHSEED = 0

.PHONY: demo test check bench clean

.venv/ready: pyproject.toml constraints.txt
	@echo "Making .venv and installing the pinned dependencies (torch 2.13.0: a CPU build where the index has one)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet -e '.[dev]' -c constraints.txt
	@touch .venv/ready

demo: .venv/ready
	@echo "Training two models on two local ranks"
	$(BIN)/distpar demo

check: .venv/ready
	@echo "Linters, types, layers"
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	@echo "Tests, two at a time"
	$(BIN)/pytest -n 2 -q

bench: .venv/ready
	@echo "Both demo models on two ranks beside DistributedDataParallel, in turns"
	$(BIN)/distpar bench examples/face.py:job --ranks 2
	$(BIN)/distpar bench examples/gpt.py:job --ranks 2

clean:
	rm -rf .venv build dist src/*.egg-info
