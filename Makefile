# Two commands do everything on a fresh machine:  make train   and   make test
# Another Python:  make test PYTHON=python3.12      Flags for the run:  make train ARGS="--max-steps 100 --name short"
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
JOBS   ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 2)")
# of tests and of pages: some only wait, for a process or for a kernel that starts or ends
WORKERS ?= $(shell $(PYTHON) -c "print($(JOBS) + 1)")
SHORT  := 10
# which pages test-all runs
PAGES  ?=
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PY := $(BIN)/python

.PHONY: help train whole test test-all lab export format notebooks site bench gpu teeth hooks clean
help:                 ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py settings.ini pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -q -c constraints.txt -e .
	@echo ok > $@

$(VENV)/.installed-dev: setup.py settings.ini pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -q --no-compile -c constraints.txt -e ".[dev]"  # a quarter is imported, and compiled then
	@echo ok > $@
	@echo ok > $(VENV)/.installed

# what the web site needs, without the package and so without torch
$(VENV)/.installed-docs: settings.ini constraints.txt | $(PY)
	sed -n 's/^docs_requirements *= *//p' settings.ini | tr ' ' '\n' > $(VENV)/docs.txt
	$(PY) -m pip install -q -c constraints.txt -r $(VENV)/docs.txt
	@echo ok > $@

train: $(VENV)/.installed  ## train the default preset (about five minutes on two cores)
	$(PY) -m tinygpt.train $(ARGS)

whole: $(VENV)/.installed  ## from a text to a model one can talk to: four runs and a table (about a quarter of an hour on two cores)
	$(PY) -m tinygpt.whole $(ARGS)

test: $(VENV)/.installed-dev  ## sync and clean, the tests that are not slow, the pages of up to ten seconds
	$(PY) tools/book.py check
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow"
	$(PY) tools/book.py run --jobs $(WORKERS) --within $(SHORT)

test-all: $(VENV)/.installed-dev  ## the same with the slow tests and all pages (PAGES=--changed: those whose code has changed)
	$(PY) tools/book.py check
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal
	$(PY) tools/book.py run --jobs $(WORKERS) $(PAGES)

lab: $(VENV)/.installed-dev  ## open the chapters in JupyterLab
	$(PY) -m jupyterlab --notebook-dir=. nbs/index.ipynb

export: $(VENV)/.installed-dev  ## pages -> package, cleaned; headers, picture and README.md made again
	$(PY) tools/book.py export

format: $(VENV)/.installed-dev  ## lay out notebooks, tests and tools as the laws of style ask, and lint them
	$(PY) -m ruff format nbs tests tools site benchmarks
	$(PY) -m ruff check --fix nbs tests tools site benchmarks

notebooks: $(VENV)/.installed-dev  ## run all chapters and store their outputs, then export
	$(PY) tools/book.py run --write
	$(MAKE) export

site: $(VENV)/.installed-docs  ## the web site from the stored outputs, into build/site/html (ARGS=--epub: an EPUB)
	$(PY) site/build.py $(ARGS)

hooks: $(VENV)/.installed-dev  ## git and Jupyter hooks that keep notebooks clean and code in style
	$(BIN)/nbdev_install_hooks
	$(BIN)/pre-commit install

bench: $(VENV)/.installed-dev  ## what this machine does: imports, the default run's speed, the chapters
	$(PY) benchmarks/everyday.py

gpu: $(VENV)/.installed-dev    ## on a machine with CUDA: every guess about GPUs becomes a record, nine minutes at a time; again: goes on
	$(PY) benchmarks/gpu.py $(ARGS)

teeth: $(VENV)/.installed-dev  ## a hole in every function, and every slip: do the tests see it? (an hour; goes on where it was)
	OMP_NUM_THREADS=1 $(PY) benchmarks/teeth.py --save

clean:                ## remove what can be made again (not your runs)
	rm -rf $(VENV) build tinygpt.egg-info .pytest_cache .ruff_cache .hypothesis
