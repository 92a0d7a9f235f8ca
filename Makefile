# make quickstart   sets everything up and goes from raw text to a chat model
# make test         sets everything up and runs the quality gates and the tests
# make screenshots  makes the pictures of the README anew, from runs/quickstart
# make docs         builds the documentation: site/index.html

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test check setup docs screenshots clean

quickstart: $(VENV)/.installed
	$(BIN)/affinage run recipes/quickstart.yaml

setup: $(VENV)/.installed

# The stamp is written last, so that an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# torch from pip by its exact version is the build for the CPU where one is offered.
$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

check: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# The documentation as a site that opens from a disk, with its search: site/index.html
docs: $(VENV)/.tested
	$(BIN)/python tools/reference.py
	$(BIN)/zensical build --clean --strict

screenshots: $(VENV)/.tested
	$(BIN)/python tools/screenshots.py runs/quickstart docs/images

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
