# Every command makes .venv first if it is missing or older than pyproject.toml. Needs Python 3.11 to 3.13, git and make.

VENV := .venv
INSTALLED := $(VENV)/.installed
# torch_xla 2.9.0 has wheels for these versions; ensurepip is what Debian leaves out without its python3-venv package.
FITS := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	$$python -c '$(FITS)' 2>/dev/null && { command -v $$python; break; }; done)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv train test quick check

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

venv: $(INSTALLED)  ## make .venv with everything that a developer needs

train: $(INSTALLED)  ## train llama-tiny on 8 virtual devices into runs/llama-tiny (go on with: make train ARGS=--resume)
	$(VENV)/bin/shardtorch train llama-tiny --devices 8 --mesh fsdp=4,tensor=2 --out runs/llama-tiny $(ARGS)

test: $(INSTALLED)  ## run all tests (one file: make test ARGS=tests/mesh)
	$(VENV)/bin/python -m pytest $(ARGS)

quick: $(INSTALLED)  ## run the tests that take at most a few seconds each
	$(VENV)/bin/python -m pytest -m "not slow" $(ARGS)

check: $(INSTALLED)  ## what a change must pass: lint, format, types, all tests
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest $(ARGS)

# The stamp goes first and comes last, so an installation that failed or was interrupted is done again.
$(INSTALLED): pyproject.toml
	@rm -f $@
	@$(VENV)/bin/python -c '$(FITS)' 2>/dev/null && $(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
		'$(PYTHON)' -c '$(FITS)' 2>/dev/null || { \
			echo "make: no Python fits: torch_xla 2.9.0 needs Python 3.11, 3.12 or 3.13, with venv." >&2; \
			echo "  got: PYTHON='$(PYTHON)'; python3 is $$(python3 -V 2>&1)" >&2; \
			echo "  fix: install one (on Debian or Ubuntu also its python3-venv), or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
			exit 1; }; \
		'$(PYTHON)' -m venv --clear $(VENV); }
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off --editable '.[dev]'
	@touch $@
