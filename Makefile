# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt, made once and again
# only where pyproject.toml or constraints.txt changed. Needed on the machine: Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
CONFORMANCE := .conformance

.PHONY: demo test test-slow conformance lint bench clean

demo: $(VENV)/training.installed  ## train on the embedded corpus, score, translate, draw: some 5 minutes on a laptop
	$(RUN) -m training.train training/recipes/demo.yaml

test: $(VENV)/dev.installed  ## the fast tests
	$(RUN) -m pytest -m "not slow" --ignore tests/conformance -n 2

test-slow: $(VENV)/dev.installed  ## real processes, compilers and trainings
	$(RUN) -m pytest -m slow --ignore tests/conformance

conformance: $(VENV)/dev.installed  ## Hugging Face's own model tests, from the sources of transformers on PyPI
	$(RUN) tests/conformance/fetch.py $(CONFORMANCE)
	PYTHONPATH=$$(echo $(CONFORMANCE)/transformers-*) $(RUN) -m pytest --import-mode=prepend -n 2 -W ignore \
		-o addopts= -o pythonpath=. -q tests/conformance

lint: $(VENV)/dev.installed  ## style, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/dev.installed  ## speed beside stock models of equal size and weights: table, JSON, chart in runs/benchmark
	$(RUN) -m training.benchmark

clean:
	rm -rf $(VENV) $(CONFORMANCE) build *.egg-info

# .venv/training.installed, .venv/dev.installed: the package with that extra
$(VENV)/%.installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@
