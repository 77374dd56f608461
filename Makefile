# Penstock. `make` lists the targets. Nothing is needed beforehand but make, git and python3 (3.11+) with venv.
# Where root may install it, PostgreSQL is installed for the tests; elsewhere its tests skip with a reason.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.installed-bench

# Lines for `help` are the `##` comments after the targets.
.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(INSTALLED) ## make .venv with every tool and the `tpu` command (instant when nothing changed)

# Hashes are required, and the build backend is itself in the lock, so pip fetches nothing that is not pinned.
$(INSTALLED): locks/dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(BENCH_INSTALLED): $(INSTALLED) locks/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/bench.txt
	touch $@

# Hugging Face's models on a processor. The lock names a build for processors only, which not every machine can have:
# there the tests that compare with them skip and say so; in CI they fail.
PARITY_INSTALLED := $(VENV)/.installed-parity
$(PARITY_INSTALLED): $(INSTALLED) locks/parity.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/parity.txt
	touch $@

.PHONY: parity
parity:
	@$(MAKE) --no-print-directory $(PARITY_INSTALLED) || echo "torch for processors cannot be had here: live parity skips"

.PHONY: demo
demo: setup walls ## a real training job here: queued, run, its slice taken away half-way, resumed, finished
	$(BIN)/python tools/demo.py

.PHONY: demo-extract
demo-extract: setup ## a tiny model's activations over a dataset, a worker killed on the way, every row once
	$(BIN)/python tools/demo_extract.py

# Jobs are walled in with bubblewrap where it can be had; `tpu doctor` says which walls stand.
.PHONY: walls
walls:
	@command -v bwrap >/dev/null || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null || \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null

# Emulated hosts are reached by ssh as real ones are. Only the program is needed: the service need not run.
.PHONY: sshd
sshd:
	@test -x /usr/sbin/sshd || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null || \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server openssh-client \
			>/dev/null

# A browser for the example page, and the JavaScript the page imports. Without them its test skips and says why.
.PHONY: browser
browser: setup
	@command -v chromedriver >/dev/null || test "$$(id -u)" -ne 0 || ! command -v apt-get >/dev/null || \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver \
			fonts-dejavu-core >/dev/null
	@! command -v npm >/dev/null || $(BIN)/python tools/fetch_firebase.py

.PHONY: test
test: setup walls browser sshd parity ## all tests, with a throwaway PostgreSQL
	tools/with_postgres $(BIN)/pytest -n 2 --dist worksteal -m "not long" $(ARGS)

.PHONY: test-long
test-long: setup walls browser sshd parity ## tests of real processes that take minutes: a gigabyte of logs, 200 jobs after each hostile one
	tools/with_postgres $(BIN)/pytest -n 2 --dist worksteal -m long --ignore tests/sim $(ARGS)

.PHONY: test-stalled
test-stalled: setup walls browser sshd parity ## the tests while servers and agents stand still at random moments: who relies on being fast?
	PYTHONPATH=$(CURDIR)/tools/stalls tools/with_postgres $(BIN)/pytest -n 4 --dist worksteal -m "not long" $(ARGS)

.PHONY: check
check: setup ## lint, format, types, the import table, and the rules about the tree itself
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/tidy

.PHONY: format
format: setup ## rewrite the code as `check` wants it, where a machine can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench-core
bench-core: $(BENCH_INSTALLED) ## speed and size of store, tick and simulator against their bounds (docs/benchmarks.md)
	tools/with_postgres $(BIN)/python bench/core.py $(ARGS)

.PHONY: bench-run
bench-run: $(BENCH_INSTALLED) ## speed and size of tpu run, exec and the API against their bounds (docs/benchmarks.md)
	$(BIN)/python bench/run.py $(ARGS)

.PHONY: bench-firestore
bench-firestore: $(BENCH_INSTALLED) ## the Firestore bridge on Google's emulator: document to running, and a burst (docs/benchmarks.md)
	$(BIN)/python bench/firestore.py $(ARGS)

.PHONY: bench-fleet
bench-fleet: $(BENCH_INSTALLED) ## 1,000 emulated nodes: reconcile, pace of creates, no 429 (18 min; ARGS=--quick: 40 s)
	$(BIN)/python bench/fleet.py $(ARGS)

.PHONY: bench-recovery
bench-recovery: setup walls ## loss of a slice to running again, on the emulated cloud (docs/benchmarks.md)
	$(BIN)/python -m bench.recovery $(ARGS)

.PHONY: bench-cost
bench-cost: $(BENCH_INSTALLED) ## the cost ledger over 100,000 attempts (docs/benchmarks.md)
	$(BIN)/python bench/cost.py $(ARGS)

.PHONY: bench-extract
bench-extract: $(BENCH_INSTALLED) ## extraction on processors: two pinned workers against one (bench/extract/h200.py: on a GPU)
	$(BIN)/python bench/extract/cpu.py $(ARGS)

.PHONY: sim-check
sim-check: setup ## every planted bug must be caught, and 200 seeds with every fault, rule and crash point be clean
	$(BIN)/pytest -n 2 -q -m long tests/sim
	$(BIN)/tpu sim check --seeds 200 $(ARGS)

MINUTES ?= 30
.PHONY: storm
storm: setup walls ## 8 slices preempted all the time, the controller killed -9: nothing lost, nothing left (about 7 min)
	$(BIN)/python -m tools.storm $(ARGS)

.PHONY: soak
soak: setup walls ## the storm, then fresh simulation seeds on all cores for MINUTES (30); fails on any violation
	$(BIN)/python -m tools.storm
	$(BIN)/python tools/soak.py --minutes $(MINUTES) $(ARGS)

# Releases younger than this stay out of the locks: a bad upload is usually withdrawn within a week.
LOCK_UNTIL ?= 2026-11-08
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-header --no-strip-extras --exclude-newer $(LOCK_UNTIL) $(LOCK_ARGS) pyproject.toml

.PHONY: lock
lock: ## make locks/*.txt anew (move LOCK_UNTIL first to let newer releases in; LOCK_ARGS=--upgrade takes them)
	test -x $(BIN)/uv || $(MAKE) setup
	$(COMPILE) -o locks/client.txt
	$(COMPILE) --extra server --extra postgres --group dev -o locks/dev.txt
	$(COMPILE) --extra server --extra postgres --group dev --group bench -o locks/bench.txt
	UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links)" $(filter-out --universal pyproject.toml,$(COMPILE)) \
		--python-platform x86_64-manylinux_2_28 --group parity -c locks/dev.txt -o locks/parity.txt
	UV_FIND_LINKS="$$($(BIN)/pip config get global.find-links)" $(filter-out --universal pyproject.toml,$(COMPILE)) \
		--python-platform x86_64-manylinux_2_28 --no-deps --group saelens -o locks/saelens.txt

.PHONY: clean
clean: ## remove .venv and everything made by the tools
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf penstock-bench-* examples/firestore_web/firebase
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
