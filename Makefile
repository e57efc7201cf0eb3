# Every target sets up what it needs: tools/bootstrap.py prints the Python to use. See `make help`.
.DEFAULT_GOAL := help

BOOTSTRAP = $$(command -v python3 || command -v python || { echo "make: install Python 3.11 or newer" >&2; exit 1; })
SETUP = bootstrap=$(BOOTSTRAP) && python=$$("$$bootstrap" tools/bootstrap.py)
# More arguments for the command, e.g. make run ARGS='-k rotor_update'
ARGS ?=

# Dozens of processes import the same modules; with this variable set each would compile them anew.
run test test-all: export PYTHONDONTWRITEBYTECODE =

.PHONY: run test test-all check format gate doctor site mutate clean help

run: ## prove, measure and report, with what this machine has
	@$(SETUP) && "$$python" -m perfsuite run $(ARGS)

# Each worker compiles by itself: helpers of torch.compile would import torch on cores that are all busy.
test test-all: export TORCHINDUCTOR_COMPILE_THREADS ?= 1

# Inductor tries each vector instruction set in every process, and compiles a program for it the first time. The kernel's
# list of what the processor has is enough.
run test test-all: export TORCHINDUCTOR_VEC_ISA_OK ?= 1

RUN_TESTS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$$python" -m tools.run_tests $(ARGS)
# What builds the site: 15,000 files, a third of all that would be installed.
SITE_TOOLS = { "$$python" -c "import material, mkdocstrings" 2>/dev/null || \
	"$$python" -m pip install --quiet -c constraints.txt mkdocs mkdocs-material mkdocstrings mkdocstrings-python >&2; }

test: ## correctness of every pair and the harness's own tests (nothing is timed)
	@$(SETUP) && $(RUN_TESTS)

test-all: export PERFSUITE_TEST_SCALE = full
test-all: override ARGS += --perfsuite-profile=thorough
test-all: ## the same with every count at its full size, and up to 500 random draws a proof: an hour or two
	@$(SETUP) && { [ -n "$$PERFSUITE_PYTHON" ] || $(SITE_TOOLS) || \
		echo "make test-all: tests of the documents' site are skipped" >&2; } && $(RUN_TESTS)

check: ## formatting, lint and types
	@$(SETUP) && { "$$python" -c "import ruff, mypy" 2>/dev/null || \
		{ echo "make check: run $$python -m pip install -c constraints.txt ruff mypy" >&2; exit 1; }; } && \
	"$$python" -m ruff format --check . && "$$python" -m ruff check . && "$$python" -m mypy

format: ## format the sources and fix lint, as `make check` requires
	@$(SETUP) && "$$python" -m ruff format . && "$$python" -m ruff check --fix .

site: export NO_MKDOCS_2_WARNING = 1
site: ## the documents as HTML, in build/site
	@$(SETUP) && $(SITE_TOOLS) && "$$python" -m mkdocs build --quiet --strict $(ARGS)

gate: ## compare this machine's measurements with its baseline
	@$(SETUP) && "$$python" -m perfsuite gate $(ARGS)

doctor: ## what this machine can run, what is missing, and the remedy
	@$(SETUP) && "$$python" -m perfsuite doctor $(ARGS)

mutate: ## put small faults into modules, one at a time: do their tests notice?
	@$(SETUP) && { "$$python" -c "import cosmic_ray" 2>/dev/null || \
		"$$python" -m pip install --quiet -c constraints.txt cosmic-ray >&2; } && "$$python" tools/mutate.py $(ARGS)

clean: ## remove caches, builds and reports; .venv, baselines and the history of runs stay
	@if [ -d .perfsuite ]; then find .perfsuite -mindepth 1 -maxdepth 1 -not -name history -not -name .gitignore -exec rm -rf {} +; fi
	@rm -rf build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.git/*' -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):[a-z ]*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done
