# make quickstart   sets everything up and goes from raw text to a chat model
# make check        sets everything up and runs ruff, mypy and import-linter
# make test         the same, and the tests that decide whether a change is right
# make test-all     the same, and every other test: tutorials, browser, TPU compiler, many kills
# make screenshots  makes the pictures of the README anew, from runs/quickstart
# make docs         builds the documentation: site/index.html

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all check setup docs screenshots clean

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

# A worker that takes tests from another keeps to the order of the files, which share what they compile.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal --max-worker-restart=0

test: check
	$(PYTEST) -m "not full"

test-all: check
	$(PYTEST)

# The documentation as a site that opens from a disk, with its search: site/index.html
docs: $(VENV)/.tested
	$(BIN)/python tools/reference.py
	$(BIN)/zensical build --clean --strict

screenshots: $(VENV)/.tested
	$(BIN)/python tools/screenshots.py runs/quickstart docs/images

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
