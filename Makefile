# `make test`, `make demo` and `make docs` do the set-up that they need on a fresh machine themselves.
BIN := .venv/bin

# STRICT=1: fail if a test passes only at a second try.
SUITE = $(BIN)/python -m tests.suite $(if $(filter-out 0,$(STRICT)),--strict)
# Images of containers often set it: then each of the thousand processes that tests start compiles
# perdure anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo docs exact agreed same test collect test-machines test-floors check gates lab nightly third-party torches gpu campaign platforms platforms-k8s bench clean
.DEFAULT_GOAL := test

setup:
	@scripts/setup.sh

# ACTS="kills elastic links replay": these acts; by default the first three.
demo:
	@echo "demo: at most five minutes on two quiet cores, the first time with its set-up"
	@scripts/setup.sh demo
	@$(BIN)/python examples/demo.py $(ACTS)

# The site of the documents, in build/site: every output that they show is compared with what the
# command prints, and a link or an anchor that leads nowhere fails. Two minutes on two cores.
docs: export NO_MKDOCS_2_WARNING := 1
docs:
	@scripts/setup.sh docs
	@$(BIN)/python -m tests.documents.shown
	@$(BIN)/mkdocs build --quiet
	@echo "docs: the site is in build/site"

check: setup
	$(BIN)/ruff format --check src lab tests examples bench scripts/check_*.py
	$(BIN)/ruff check src lab tests examples bench scripts/check_*.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python scripts/check_prose.py
	@$(BIN)/python scripts/check_size.py

# A failed test runs again alone, up to twice (tests/suite.py).
test: setup
	@$(SUITE) --beside "$(MAKE) --no-print-directory check collect" serial parallel

# Four processes of pytest would each compile all tests at once, for the first time in a clone.
collect: setup
	@$(BIN)/python -m pytest --collect-only -qq tests > /dev/null || true

# The core and the serial part on machines that once broke them (tests/machines.py): about an hour.
# MACHINES="uptime busy": these ones.
test-machines: check
	@$(BIN)/python -m tests.machines $(MACHINES)

# Tests of the page, the bus, torchft, and the commands with the lowest version of each library that
# pyproject.toml allows (tests/floors.py). TESTS="FILE ...": these tests.
test-floors: setup
	@$(BIN)/python -m tests.floors $(TESTS)

# Training loops that are killed twice, beside undisturbed ones: equal to the bit, or named.
exact: setup
	$(BIN)/python -m tests.situations exact

# Elastic worlds beside plain loops over the same micro-batches: an hour on two cores.
agreed: setup
	$(BIN)/python -m tests.situations agreed

# 66 scripts: a rank from the warm image finds what a fresh Python finds, in two lives.
same: setup
	$(BIN)/python -m pytest -q tests/e2e/test_same.py

# Bounds on time, CPU, and memory: alone on a quiet machine.
# OLD=REVISION: measure that revision in each pair as well. PAIRS=NUM: that many pairs of each gate.
# ONLY="NAME ...": these gates.
gates: setup
	@$(BIN)/python -m bench.gates $(if $(OLD),--old $(OLD)) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(ONLY),--only $(ONLY))

# The laboratory whole; `make test` runs the shorter half of it.
lab: setup
	$(BIN)/pytest -q tests/lab

# The tests of torchft with a nightly build of it, which is downloaded.
nightly: setup
	@scripts/nightly.sh

# Published libraries' own saves (DeepSpeed, Lightning, an S3 store among them): killed, cut, and
# preempted. The libraries are downloaded into .venv-third-party, 0.2 GB.
third-party: setup
	@scripts/third_party.sh

# The tests that know torch best, with each torch from 2.9 on and with Python 3.11 to 3.13: three
# environments in build/, 5 GB, whose torches are downloaded once.
torches: setup
	@scripts/torches.sh

# What only a GPU can show, on one GPU: three parts of 8 minutes at most, into .gpu (docs/gpu.md).
# Without CUDA everything is skipped; `make gpu DRY=--dry` tries the harness on the CPU.
PART ?= all
gpu:
	@scripts/gpu.sh $(PART) --out .gpu $(DRY)

# All that is left out of `make test`, the platforms that this machine can have among it. What the
# exploration finds is kept in .seeds and tried first by the next one.
campaign: setup
	$(BIN)/python bench/campaign.py
	$(BIN)/python bench/campaign_failpoints.py
	$(BIN)/python bench/campaign_journal.py
	$(BIN)/python bench/campaign_own.py
	@$(SUITE) long
	for round in 1 2 3 4 5; do PERDURE_EXPLORE=1 $(BIN)/pytest -q tests/properties || exit 1; done
	$(MAKE) platforms

# Jobs on real platforms, started here: sshd; Slurm, whose packages are installed where root and apt
# are; Kubernetes, which platforms-k8s makes. More than an hour on two cores.
platforms: setup
	@scripts/setup_platforms.sh
	@$(SUITE) platforms

# The part of it on a Kubernetes of one node, which is built and kept here first: root, 8 minutes, once.
platforms-k8s: setup
	@scripts/build_kubernetes.sh
	@$(SUITE) k8s

bench: setup
	$(BIN)/python bench/run_all.py

clean:
	rm -rf .demo .venv-nightly .venv-third-party .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
