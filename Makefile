# `make train` and `make test` set everything up by themselves; PYTHON chooses the interpreter (3.10 to 3.12).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The pinned set is Python 3.11's; other versions take what setup.cfg allows.
PINNED := $(shell $(PYTHON) -c 'import sys; print("--constraint constraints.txt" if sys.version_info[:2] == (3, 11) else "")')

.PHONY: train test docs parity lint clean

train: $(STAMP)  ## trains the embedded digits: about a minute on two CPU cores
	$(BIN)/python -m vit_tpu.train

test: $(STAMP) lint  ## runs every test
	$(BIN)/python -m pytest

docs: $(STAMP)  ## writes the pages that come from the source
	$(BIN)/python docs/build.py

parity: $(STAMP)  ## also installs PyTorch, timm and transformers (several GB) and runs our weights through them
	$(BIN)/python -m pip install --quiet ".[parity]"
	$(BIN)/python -m pytest tests/weights/test_torch_live.py

lint: $(STAMP)
	$(BIN)/ruff check vit_tpu tests benchmarks docs
	$(BIN)/mypy

$(STAMP): setup.cfg setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PINNED) --editable ".[test,plan,data,export,notebooks]"
	$(BIN)/python -m pip check
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
