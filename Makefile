# Each target installs its requirements into a virtual environment in .venv, with the versions of constraints.txt. Changes
# of pyproject.toml or constraints.txt trigger a new installation. Requires Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
OLDEST := .venv-oldest
CONFORMANCE := .conformance
CONSTRAINTS := constraints.txt

.PHONY: help demo test test-slow test-oldest fuzz conformance lint bench docs clean

help:  ## list all targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/training.installed  ## train on the built-in corpus and evaluate: about 5 minutes on a laptop
	$(RUN) -m training.train training/recipes/demo.yaml

test: $(VENV)/dev.installed  ## the fast tests
	$(RUN) -m pytest -m "not slow" --ignore tests/conformance -n 2 --dist worksteal

test-slow: $(VENV)/dev.installed  ## real processes, compilers and trainings
	$(RUN) -m pytest -m slow --ignore tests/conformance -n 2 --dist worksteal --durations 40

fuzz: $(VENV)/dev.installed  ## random input for all commands, VT_FUZZ_SECONDS=10 per family
	$(RUN) -m pytest -s -m slow tests/fuzz

# To avoid the CUDA build of torch (3 GB): UV_TORCH_BACKEND=cpu make test-oldest
test-oldest: $(OLDEST)/package.installed  ## the package's fast tests with the oldest versions that pyproject.toml allows
	CUDA_VISIBLE_DEVICES= $(OLDEST)/bin/python -m pytest -m "not slow" -n 2 --dist worksteal tests/vanilla_transformer

conformance: $(VENV)/dev.installed  ## the model tests of Transformers, from its source distribution on PyPI
	$(RUN) tests/conformance/fetch.py $(CONFORMANCE)
	PYTHONPATH=$$(echo $(CONFORMANCE)/transformers-*) $(RUN) -m pytest --import-mode=prepend -n 2 --dist worksteal \
		-W ignore -W always::FutureWarning --disable-warnings -o addopts= -o pythonpath=. -q tests/conformance

lint: $(VENV)/dev.installed  ## style, format, types, terms, conventions of model files (mlinter)
	$(VENV)/bin/ruff check .
	$(RUN) tests/check_language.py
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -q tests/vanilla_transformer/test_model_conventions.py

bench: $(VENV)/dev.installed  ## speed compared with native Transformers models; writes to runs/benchmark
	$(RUN) -m training.benchmark

docs: $(VENV)/training.installed $(VENV)/docs.installed  ## build the documentation and the API reference in build/site
	$(RUN) docs/recipe_keys.py
	$(RUN) docs/commands.py
	$(RUN) -m mkdocs build --strict

clean:  ## remove environments and build outputs, but no runs
	rm -rf $(VENV) $(OLDEST) $(CONFORMANCE) build *.egg-info

# .venv/training.installed, .venv/dev.installed: the package with that extra
$(VENV)/%.installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[$*]"
	touch $@

# The package without extras, each requirement at its lower bound, and the test requirements
# (torch requires setuptools to compile FlexAttention)
$(OLDEST)/package.installed: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable . \
		"accelerate>=1.15" "hypothesis>=6.150" "pytest>=9.2" "pytest-timeout>=2.4" "pytest-xdist>=3.8" "setuptools>=77"
	touch $@
