# `make test`, `make demo` and `make docs` do the set-up that they need on a fresh machine themselves.
BIN := .venv/bin

# Serial tests time real processes on a machine that others may use: a second try is shown, not hidden.
# More than two in the three runs of `make test` fail it (tests/second_tries.py).
SECOND_TRY := --reruns 1 -r R
# Images of containers often set it: then each of the thousand processes that tests start compiles
# perdure anew.
unexport PYTHONDONTWRITEBYTECODE
TRIES := $(CURDIR)/build/second-tries.txt

.PHONY: setup demo docs test check lab nightly torches gpu campaign platforms platforms-k8s bench clean
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
	$(BIN)/ruff format --check src tests examples bench
	$(BIN)/ruff check src tests examples bench
	$(BIN)/mypy
	$(BIN)/lint-imports

# Of other files none is imported for these: that takes half a minute.
SERIAL = $$(grep -rl --include "test_*.py" --exclude-dir lab --exclude-dir platforms "mark\.serial" tests)

# Three tests at once, also on two cores: a test of a whole job waits for a third of its time.
test: export PERDURE_SECOND_TRIES := $(TRIES)
test: check
	@rm -f $(TRIES)
	$(BIN)/pytest -q -m "not serial and not long" -n 3 --dist worksteal $(SECOND_TRY) --ignore tests/platforms
	$(BIN)/pytest -q -m "serial and not long" $(SECOND_TRY) $(SERIAL)
	$(BIN)/pytest -q $(SECOND_TRY) tests/lab -k "not (stop or gil or sleep or backward or data or memory or size)"

# The laboratory whole; `make test` runs the shorter half of it.
lab: setup
	$(BIN)/pytest -q tests/lab

# The tests of torchft with a nightly build of it, which is downloaded.
nightly: setup
	@scripts/nightly.sh

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
	$(BIN)/pytest -q -m long $(SECOND_TRY) --ignore tests/platforms
	for round in 1 2 3 4 5; do PERDURE_EXPLORE=1 $(BIN)/pytest -q tests/properties || exit 1; done
	$(MAKE) platforms

# Jobs on real platforms, started here: sshd; Slurm, whose packages are installed where root and apt
# are; Kubernetes, which platforms-k8s makes. More than an hour on two cores.
platforms: setup
	@scripts/setup_platforms.sh
	$(BIN)/pytest -q $(SECOND_TRY) tests/platforms

# The part of it on a Kubernetes of one node, which is built and kept here first: root, 8 minutes, once.
platforms-k8s: setup
	@scripts/build_kubernetes.sh
	$(BIN)/pytest -q $(SECOND_TRY) tests/platforms/k8s

bench: setup
	$(BIN)/python bench/run_all.py

clean:
	rm -rf .demo .venv-nightly .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
