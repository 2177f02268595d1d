# cdr_lib: two commands do everything, each from a fresh clone on its own.
#   make report   set up, then regenerate every table and figure of the `sample` profile (offline after the install)
#   make test     set up, then export, test, clean, run pytest, the sample report and the site
PYTHON  ?= python3
VENV    ?= .venv
PROFILE ?= sample
PORT    ?= 8888
BIN     := $(abspath $(VENV))/bin
READY   := $(VENV)/.ready
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help setup report test docs lab bench pins nbs clean

help:
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## create .venv with the pinned packages

$(READY): settings.ini setup.py constraints.txt
	@command -v git >/dev/null || { echo "git is missing: install git and run make again"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or newer and run make again"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: install Python 3.10 or newer, or run make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: the package python3-venv) and run make again"; exit 1; }
	@echo "Setting up $(VENV) with the versions of constraints.txt (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

report: $(READY) ## every table and figure of PROFILE (sample, real, paper) under reports/
	@$(BIN)/cdr report --profile $(PROFILE)

test: $(READY) ## export, test, clean, fail on any difference; pytest; sample report; site
	@$(BIN)/python tests/check_sources.py
	@$(BIN)/python -m pytest -q
	@$(BIN)/python tests/check_report.py
	@$(MAKE) --no-print-directory docs
	@CDR_SITE=_docs $(BIN)/python -m pytest -q tests/test_site_real.py

docs: $(READY) ## the documentation site, in _docs/index.html
	@$(BIN)/python -m cdr_lib.reporting.site

lab: $(READY) ## JupyterLab with this environment's kernel and nbdev's git hooks
	@$(BIN)/nbdev_install_hooks
	@$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "cdr_lib" >/dev/null
	@$(BIN)/jupyter lab --notebook-dir=. --port=$(PORT)

bench: $(READY) ## speed and memory as ratios, measured side by side
	@$(BIN)/python -m tests.bench

nbs: $(READY) ## after editing notebooks: export, test, clean, README
	@$(BIN)/python tests/check_sources.py --write

pins: $(READY) ## constraints.txt and environment.yml from settings.ini and this environment
	@$(BIN)/python -c 'from cdr_lib.reporting.pins import write_pins; write_pins()'

clean: ## remove everything that can be made again, except .venv
	@rm -rf _docs _proc .cache .pytest_cache .hypothesis .ruff_cache build dist *.egg-info reports/*/.state
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
