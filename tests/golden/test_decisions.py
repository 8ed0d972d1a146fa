"""What is decided and reported stays what it was, to the letter, while the house is rebuilt.

`UPDATE_GOLDEN=1 pytest tests/golden -m ""` writes the files anew. A difference is a defect, or one
that was mended on purpose: then the commit says which, and why. `python -m tests.golden.decisions
FAMILY SEED` prints what a hash stands for, here and at any commit that has it.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.golden.decisions import (
    FAMILIES,
    decide_again,
    find_recorded,
    play,
    read_recorded,
    report_again,
    summarize,
)

FOLDER = Path(__file__).resolve().parent
SEEDS = FOLDER / "decisions.json"
FEW = 2
"""Seeds of each family in the short form."""


def check(path: Path, found: dict[str, Any]) -> None:
    """Compare `found` with what `path` holds under the same names, or write it there.

    Raises:
        AssertionError: it differs, or is not written yet.
    """
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        known |= found
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert found == {name: known.get(name) for name in found}


def play_seeds(family: str, seeds: range) -> dict[str, str]:
    """Return the name of each run, and what its decisions come to."""
    return {f"{family} {seed}": summarize(play(family, seed)) for seed in seeds}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_seeds_are_decided_as_ever(family: str) -> None:
    check(SEEDS, play_seeds(family, FAMILIES[family][1][:FEW]))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_seed_is_decided_as_ever(family: str) -> None:
    check(SEEDS, play_seeds(family, FAMILIES[family][1]))


@pytest.mark.parametrize("name", find_recorded())
def test_a_recorded_job_is_decided_and_reported_as_ever(name: str) -> None:
    entries = read_recorded(name)
    found = {"decisions": decide_again(entries), "report": report_again(entries)}
    check(FOLDER / "journals" / f"{name}.json", found)
