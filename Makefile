# The commands of the project. They need python3 (3.11 or newer), make and a package index; everything is installed into $(VENV).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
VENV_NEWEST := .venv-newest
VENV_ALPA := .venv-alpa
JOBS ?= 2

# Every stamp is remade when one of these changes; otherwise a second run installs nothing.
PINS := pyproject.toml constraints/py311.txt constraints/py312.txt

# The newest interpreter that is tested: the first that runs (a pyenv shim may exist and not run). Empty if there is none.
ifndef PYTHON_NEWEST
PYTHON_NEWEST := $(shell for python in python3.13 python3.12 \
	"$$HOME"/.pyenv/versions/3.13.*/bin/python3.13 "$$HOME"/.pyenv/versions/3.12.*/bin/python3.12; \
	do if "$$python" -c "" 2>/dev/null; then echo "$$python"; break; fi; done)
endif

# Alpa 0.2.3 runs on nothing newer than Python 3.11, and the library, which its tests import, on nothing older. Empty if there is none.
ifndef PYTHON_ALPA
PYTHON_ALPA := $(shell for python in python3.11 "$$HOME"/.pyenv/versions/3.11.*/bin/python3.11; \
	do if "$$python" -c "" 2>/dev/null; then echo "$$python"; break; fi; done)
endif

# The extras that the checks need (a name, because a comma would end an argument of call).
DEV_EXTRAS := [models,ray,cuda-targets,tpu-targets,dev]

# Where compilers for GPUs and TPUs are installed and no such device is there, JAX prints their tracebacks in every script unless it is told to use the CPU.
CPU_WITHOUT_ACCELERATORS := import glob, os; any(map(glob.glob, ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*"))) or os.environ.setdefault("JAX_PLATFORMS", "cpu")

# $(call install,VENV,PYTHON,EXTRAS): make the environment if there is none, and install the package with the pins of its interpreter.
define install
	@if ! "$(2)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "$(2) is missing or older than 3.11; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if [ ! -x "$(1)/bin/python" ]; then \
		echo "Making $(1) with $$("$(2)" --version)"; \
		"$(2)" -m venv "$(1)" || { rm -rf "$(1)"; echo "python -m venv failed; on Debian and Ubuntu install python3-venv" >&2; exit 1; }; fi
	@pins=$$("$(1)/bin/python" -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
		echo "Installing capture$(3) into $(1), versions of constraints/$$pins.txt"; \
		"$(1)/bin/python" -m pip install --quiet --disable-pip-version-check -e '.$(3)' -c "constraints/$$pins.txt"; \
		printf '%s\n' '$(CPU_WITHOUT_ACCELERATORS)' > "$$("$(1)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cpu_without_accelerators.pth"
endef

.PHONY: help
help: ## Say what the targets do
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

.PHONY: setup
setup: $(VENV)/.stamp-dev ## Install everything that README and the checks need

$(VENV)/.stamp-dev: $(PINS)
	$(call install,$(VENV),$(PYTHON),$(DEV_EXTRAS))
	@touch $@

$(VENV_NEWEST)/.stamp-dev: $(PINS)
	$(call install,$(VENV_NEWEST),$(PYTHON_NEWEST),$(DEV_EXTRAS))
	@touch $@

.PHONY: demo
demo: $(VENV)/.stamp-dev ## The whole path on a small GPT, eight virtual CPU devices
	$(VENV)/bin/capture demo

.PHONY: lint
lint: $(VENV)/.stamp-dev ## Style, types and import contracts
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

.PHONY: format
format: $(VENV)/.stamp-dev ## Rewrite the sources in the project's style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

.PHONY: docs
docs: $(VENV)/.stamp-dev ## Make docs/reference again: commands, files and error codes, from the code
	$(VENV)/bin/python -m docs.generate

.PHONY: test
test: $(VENV)/.stamp-dev ## All tests, the blocks of README and docs, and the doctests
	$(VENV)/bin/python -m pytest -q -n $(JOBS)

.PHONY: test-fast
test-fast: $(VENV)/.stamp-dev ## What one runs all the time: unit and property tests, about a minute
	$(VENV)/bin/python -m pytest -q -n $(JOBS) tests/unit tests/property

.PHONY: test-slow
test-slow: $(VENV)/.stamp-dev ## What make test leaves out: models of the zoo, absent chips, processes that are killed
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist=loadgroup -m slow

.PHONY: test-exhaustive
test-exhaustive: $(VENV)/.stamp-dev ## The rest of what make test-slow has a part of: every schedule with every remat, larger models
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist=load -m exhaustive

.PHONY: recorded
recorded: $(VENV)/.stamp-dev ## All recorded cases, to the byte; make test compares a sample
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist=load -m "recorded or not recorded" tests/recorded

.PHONY: ray
ray: $(VENV)/.stamp-dev ## Profiling and training on Ray clusters of several nodes on this machine, some of which are killed
	$(VENV)/bin/python -m pytest -q -m ray tests/command_line/test_ray.py

.PHONY: alpa
ifeq ($(strip $(PYTHON_ALPA)),)
alpa:
	@echo "SKIPPED: no python3.11 was found, so exported plans were not judged by Alpa; name one: make alpa PYTHON_ALPA=/path/to/python3.11"
else
$(VENV_ALPA)/.stamp: constraints/alpa.txt
	@echo "Installing alpa into $(VENV_ALPA), versions of constraints/alpa.txt"
	@[ -x $(VENV_ALPA)/bin/python ] || "$(PYTHON_ALPA)" -m venv $(VENV_ALPA)
	@# Its own requirements have no solution that a resolver finds; the file is complete.
	@$(VENV_ALPA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/alpa.txt
	@touch $@

alpa: ## Exported plans judged by real Alpa, in an environment of its own
	@if $(MAKE) --no-print-directory $(VENV_ALPA)/.stamp; then \
		$(VENV_ALPA)/bin/python -m pytest -q -p no:cacheprovider --confcutdir=tests/alpa_conformance -c tests/alpa_conformance/pytest.ini tests/alpa_conformance; \
	else echo "SKIPPED: $(VENV_ALPA) could not be made, so exported plans were not judged by Alpa"; fi
endif

# Outside the checks: minutes to an hour. The date is the record's; the same seed draws the same mutants as long as a module stays.
MUTATION_RECORD ?= benchmarks/results/$(shell date +%F)-mutation.json

.PHONY: mutate
mutate: $(VENV)/.stamp-mutation ## Mutants of the predictor, the step, the searches and the meters: which faults the tests notice
	$(VENV)/bin/python benchmarks/mutation.py --jobs $(JOBS) -o $(MUTATION_RECORD)

$(VENV)/.stamp-mutation: $(VENV)/.stamp-dev
	$(call install,$(VENV),$(PYTHON),[mutation])
	@touch $@

.PHONY: environments
environments: ## Make the environments that check uses beside $(VENV), as far as they can be made
	-@$(MAKE) --no-print-directory $(VENV_NEWEST)/.stamp-dev
	-@$(MAKE) --no-print-directory $(VENV_ALPA)/.stamp

.PHONY: check
check: lint smoke-newest test test-slow ray alpa ## What .ci/run runs beside and after its walk through the pages: lint, the newest JAX, the tests, Ray clusters, and Alpa as a judge

# Plans for the CPU and for a GPU that is not there, and a checked run of every kind of plan.
SMOKE := $(addprefix tests/command_line/, \
	test_bounds_first.py::test_on_the_command_line \
	test_bounds_first.py::test_a_plan_for_an_accelerator_has_the_time_of_its_step \
	test_plan_kinds.py::test_a_sharding_plan_is_compiled_and_run \
	test_layers_cli.py::test_a_workload_is_profiled_planned_run_and_compiled \
	test_array.py::test_adapters_share_their_base) \
	tests/multi_device/test_pipeline.py::test_sharded_parameters \
	tests/differential/test_whole_question.py::test_no_floor_is_above_the_bound_of_its_part

.PHONY: smoke-newest test-newest
ifeq ($(strip $(PYTHON_NEWEST)),)
smoke-newest test-newest:
	@echo "Skipped: neither python3.13 nor python3.12 was found; name one: make $@ PYTHON_NEWEST=/path/to/python3.12"
else
smoke-newest: ## A minute of tests with the newest Python and JAX that are supported, if there is one
	@if $(MAKE) --no-print-directory $(VENV_NEWEST)/.stamp-dev; then \
		$(VENV_NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist=load -m "" $(SMOKE); \
	else echo "SKIPPED: $(VENV_NEWEST) could not be made, so the newest JAX was not tried"; fi

test-newest: $(VENV_NEWEST)/.stamp-dev ## All tests with the newest Python and JAX that are supported, if there is one
	$(VENV_NEWEST)/bin/python -m pytest -q -n $(JOBS)
endif

.PHONY: clean
clean: ## Remove the environments and the caches
	rm -rf $(VENV) $(VENV_NEWEST) $(VENV_ALPA) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
