# Everything a developer types; `make` alone says what there is. Nothing is installed outside .venv.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.10; do $$p -c "" 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := examples/extractor_conse examples/pose_estimator_turntable
STAMP := $(VENV)/.installed
EXTRAS ?= dev,docs,e2e
JOBS ?= 2
OUT ?= demo
SYSTEM = build-essential python3-dev python3-venv libegl1 libgl1 libglib2.0-0 libopengl0
# Compiled code is kept, whatever the environment says: each process would compile all of it again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install same-python system demo check test release lint format docs bench clean

help:  ## Show this help
	@echo "usage: make TARGET"
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  \1\t/' | expand -t 12
	@echo "Python: $(or $(PYTHON),none found (3.10 to 3.14 is needed: make PYTHON=...)); extras: $(EXTRAS)"

install: same-python $(STAMP)  ## Make .venv and install the package with its development tools

# A Python that is asked for has to be the one that .venv is of.
same-python:
	@version='import sys; print("%d.%d" % sys.version_info[:2])'; \
	if [ "$(origin PYTHON)" = "command line" ] && [ -x $(BIN)/python ] && \
	   [ "$$($(PYTHON) -c "$$version")" != "$$($(BIN)/python -c "$$version")" ]; then \
	  echo "Error: $(VENV) is of $$($(BIN)/python --version), not of $(PYTHON): run make clean first." >&2; exit 2; \
	fi

# What no wheel brings, all of it at once and before minutes of installing. The libraries are those of OpenCV, Open3D and
# MeshLab.
system:
	@test "$$(uname)" = Linux && test ! -e $(STAMP) && test -n "$(PYTHON)" || exit 0; \
	$(PYTHON) -c "" || { echo "Error: $(PYTHON) does not run: say make PYTHON=/path/to/python." >&2; exit 2; }; missing=; \
	command -v c++ >/dev/null || missing="$$missing c++"; \
	$(PYTHON) -c "import ensurepip" 2>/dev/null || missing="$$missing ensurepip"; \
	$(PYTHON) -c "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" 2>/dev/null || \
	  missing="$$missing Python.h"; \
	for library in libEGL.so.1 libGL.so.1 libgthread-2.0.so.0 libOpenGL.so.0 libX11.so.6; do \
	  $(PYTHON) -c "import ctypes; ctypes.CDLL('$$library')" 2>/dev/null || missing="$$missing $$library"; \
	done; \
	test -z "$$missing" || { echo "Error: this machine lacks$$missing: on Debian or Ubuntu, apt install $(SYSTEM)." >&2; exit 2; }

$(STAMP): pyproject.toml $(PLUGINS:%=%/pyproject.toml) | system
	@test -n "$(PYTHON)" || { echo "Error: no Python 3.10 to 3.14 was found: install one, or say make PYTHON=/path/to/python." >&2; exit 2; }
	@echo "Installing into $(VENV) (a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]" $(PLUGINS:%=--editable %)
	@touch $@

demo: install  ## Train, evaluate and query a made-up room on this machine; writes demo/report.html
	$(BIN)/f3rm-ext demo --out $(OUT)

check: lint  ## Check style and types, then run the unit tests: what to run before a commit
	$(PYTEST) tests/unit

test: lint docs  ## Check style, types and docs, then run all tests that this machine can run
	$(PYTEST)

release: test  ## Run all tests and those that only a release needs
	$(PYTEST) -m release
	# Compiled kernels do not check their indices: one that is too large writes into other data.
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/build/numba $(PYTEST) $(addprefix tests/unit/,data mesh nerf splat)
	# Other tests run where more is installed than a user has.
	.ci/fresh

lint: install  ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright

format: install  ## Format the code
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

docs: install  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install  ## Measure training on the CPU: make bench DATA=CAPTURE
	@test -n "$(DATA)" || { echo "Error: say which capture to measure on: make bench DATA=path/to/capture." >&2; exit 2; }
	$(BIN)/python benchmarks/cpu_training.py --data "$(DATA)"

clean:  ## Remove what can be made again: .venv, caches, site; demo folders and runs are kept
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
