# Needs Python 3.11 or newer and make; everything else is installed into $(VENV).
#   PYTHON=/path/to/python3.12   the Python to make the environment with
#   VENV=/path/to/folder         where the environment lies
#   ARGS="--minutes 2"           options for `lmcourse quickstart` or `lmcourse pipeline`
#   PIP_EXTRA="..."              more options for pip. On Linux, PyPI's torch brings several GB of CUDA libraries;
#                                the CPU build is smaller and does the same:
#   make quickstart PIP_EXTRA="--extra-index-url https://download.pytorch.org/whl/cpu"
VENV ?= .venv
BIN   = $(VENV)/bin
READY = $(VENV)/.ready

help: ## this list
	@echo "lmcourse: build a language model from scratch"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

quickstart: $(READY) ## from text to a trained model and its stories, in about five minutes
	@echo "to use the command lmcourse in this shell: source $(BIN)/activate"
	$(BIN)/lmcourse quickstart $(ARGS)

pipeline: $(READY) ## the whole course in one go: from web pages to a model that does what you ask
	@echo "to use the command lmcourse in this shell: source $(BIN)/activate"
	$(BIN)/lmcourse pipeline $(ARGS)

test: $(READY) ## everything a change must pass
	$(BIN)/python tools/check.py

test-all: $(READY) ## the same with the long tier
	$(BIN)/python tools/check.py --slow

matrix: $(READY) ## the notebooks and tests in many surroundings, one after another: hours
	$(BIN)/python tools/matrix.py

docs: $(READY) ## the site, in _docs
	$(BIN)/python tools/build_docs.py

docs-quarto: $(READY) ## the same site made by Quarto 1.7.34, which must be installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/build_docs.py --quarto

lab: $(READY) ## the notebooks in JupyterLab, beginning at the first page
	$(BIN)/jupyter lab --notebook-dir=nbs --LabApp.default_url=/lab/tree/index.ipynb

student: $(READY) ## the notebooks for students, exercises without answers, in _student
	$(BIN)/python tools/student.py

bench: $(READY) ## speeds on this machine: cells that measure, saved in their notebooks, all ratios on one page, and the tools' own, kept in bench/
	$(BIN)/python tools/run_nbs.py --flags bench
	$(BIN)/python -m pytest tests -m bench -s -q

gpu: $(READY) ## all that is worth measuring on a GPU, step by step, kept in nbs/results
	$(BIN)/python tools/gpu.py

clean: ## remove what was built; the environment, runs, data and the student edition stay
	rm -rf _docs _proc build dist lmcourse.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find lmcourse nbs tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

# The environment: made once, brought up to date when one of these files changes.
$(READY): settings.ini setup.py pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && exec $$p -m venv $(VENV); \
	  done; \
	  echo "lmcourse needs Python 3.11 or newer, but python3 is `python3 --version 2>&1`. Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "installing into $(VENV) (a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_EXTRA) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # On all cores, where pip would use one; a few files of packages are no Python 3
	@touch $@

.PHONY: help quickstart pipeline test test-all matrix docs docs-quarto lab student bench gpu clean
