"""The short form of `bench/bench_growth.py`: what a large job leaves, and what reading it costs."""

import argparse
import cProfile
import os
import pstats
import sys
from pathlib import Path

import pytest

from perdure.cli.jobs import find_here
from perdure.cli.looking.story import Story, tell_story
from perdure.service.jobfiles import write_document
from perdure.service.jobfolders import paths_of
from perdure.telemetry.accounting.ledger import make_report

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

from bench_growth import NAME, Month, write_curves, write_journal
from tests.journals import make_series


def make_job(home: Path, **wanted: float) -> Month:
    args = argparse.Namespace(
        **{"days": 1.0, "ranks": 64, "failure_h": 8.0, "checkpoint_min": 30.0, **wanted}
    )
    month = Month(args)
    paths = paths_of(str(home), NAME)
    os.makedirs(paths.root)
    write_document(paths.spec, month.spec)
    write_journal(month, paths.journal)
    return month


def read_story(home: Path, *, page: bool = False) -> Story:
    return tell_story(find_here(NAME, str(home)), page=page)


def count_calls(home: Path) -> int:
    profile = cProfile.Profile()
    profile.runcall(read_story, home)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


def test_a_day_of_many_ranks_is_small_and_read_as_a_whole(tmp_path: Path) -> None:
    """T12: accounts of all ranks every five seconds were 110 GB a month of 1,000 ranks."""
    month = make_job(tmp_path)
    journal = Path(paths_of(str(tmp_path), NAME).journal)
    lines = journal.read_bytes().splitlines()
    assert len(lines) < 5500
    assert journal.stat().st_size < 5_000_000
    told, page = read_story(tmp_path), read_story(tmp_path, page=True)
    assert told.tally.whole
    assert len(told.report.recoveries) == month.generation + 1 == 3
    assert told.report == page.report
    entries = list(find_here(NAME, str(tmp_path)).read())
    assert told.report == make_report(entries, entries[-1].at_s)
    assert page.series == make_series(entries, entries[-1].at_s)
    assert told.report.goodput > 0.9
    assert told.report.ledger["unattributed"].fraction < 0.001


def test_a_report_of_four_times_as_many_failures_costs_four_times_as_much(tmp_path: Path) -> None:
    """T12: of 3,000 failures it took 4 to 5 s, for each looked through all others."""
    costs = []
    for days in (0.125, 0.5):
        home = tmp_path / str(days)
        make_job(home, ranks=2, days=days, failure_h=0.01, checkpoint_min=600.0)
        costs.append(count_calls(home))
    assert costs[1] < 4.4 * costs[0], costs


@pytest.mark.parametrize("values", [3_000, 40_000])
def test_curves_of_any_length_take_a_bounded_room(tmp_path: Path, values: int) -> None:
    month = Month(argparse.Namespace(days=1, ranks=8, failure_h=48, checkpoint_min=30))
    cost = write_curves(str(tmp_path), month, values / 86_400)
    assert cost["MB"] < 64 * 2 * (4096 + 2048 * 4) / 1e6 + 1.1
