# make book   execute the chapters and build the pages: book/_build/html/index.html
# make test   lint and run the tests
# make bench  time every operator beside torch's attention on this CPU: results/bench
# make lab    open the chapters in JupyterLab
# make clean  remove what a build made (clean-all: the environment too)
#
# Each sets itself up in .venv first, and may be run again at any time. Another Python than `python3`:
# make book PYTHON=python3.12

PYTHON ?= python3
# Arguments of the benchmark, as in make bench BENCH="--device cuda --context 2048 16384 --dtype bfloat16"
BENCH ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: book test bench lab setup clean clean-all
.DELETE_ON_ERROR:

book: setup
	$(BIN)/softmaxlab book

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2

bench: setup
	$(BIN)/softmaxlab bench operators $(BENCH)

lab: setup
	mkdir -p $(VENV)/share/jupyter/lab/settings
	cp book/lab-overrides.json $(VENV)/share/jupyter/lab/settings/overrides.json
	$(BIN)/jupyter lab --notebook-dir=notebooks

setup: $(VENV)/.model

# A stamp is written when its step is complete, so an interrupted one is done again. The environment is
# emptied when a pin changes: it holds what requirements.txt names and nothing that was there before.
$(VENV)/.requirements: requirements.txt constraints-cuda.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v[:2] <= (3, 13); \
	ok or sys.exit("softmaxlab needs Python 3.11, 3.12 or 3.13 and $(PYTHON) is %d.%d.%d: name another, as in make book PYTHON=python3.12" % v[:3])'
	@echo "Installing the pinned packages into $(VENV): some minutes the first time."
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --requirement requirements.txt
	@touch $@

$(VENV)/.package: $(VENV)/.requirements pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.model: $(VENV)/.package
	$(BIN)/python -m softmaxlab.models smollm2-135m
	@touch $@

clean:
	rm -rf book/_build book/_generated book/executed build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find softmaxlab tests book notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf $(VENV)
