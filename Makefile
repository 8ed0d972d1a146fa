# `make demo` and `make test` do all the set-up on a fresh machine through `make setup`.
BIN := .venv/bin

.PHONY: setup demo test check lab campaign bench clean
.DEFAULT_GOAL := test

setup:
	@scripts/setup.sh

demo: setup
	@$(BIN)/python examples/demo.py
	@$(BIN)/python examples/demo_links.py

check: setup
	$(BIN)/ruff format --check src tests examples bench
	$(BIN)/ruff check src tests examples bench
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -q -m "not serial" -n 2 --dist worksteal
	$(BIN)/pytest -q -m serial --ignore tests/lab

# Faults between network namespaces: needs root, and a machine with nothing else to do.
lab: setup
	$(BIN)/pytest -q tests/lab

campaign: setup
	$(BIN)/python bench/campaign.py

bench: setup
	$(BIN)/python bench/run_all.py

clean:
	rm -rf .demo .demo-links .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
