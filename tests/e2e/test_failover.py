"""The node that has the lease is lost, with its server, its agent and its rank.

That an elastic world trains on meanwhile is for `bench/bench_failover.py` to show: it takes longer.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.failover import NAME, Site
from tests.e2e.harness import Job


@pytest.mark.slow
def test_another_node_goes_on_deciding(start: Callable[..., Job], tmp_path: Path) -> None:
    site = Site(start, tmp_path, elastic=False, node_lost_s=10.0)
    job = site.job
    job.wait_until(lambda: len(site.bodies("RanksStarted")) == 3, "three ranks")
    before, known = site.journal(), site.terms()
    term, lost = known[-1]
    site.kill_node(lost)
    job.wait_until(lambda: len(site.terms()) > len(known), "the next controller")
    job.wait_until(lambda: site.bodies("NodeLost"), "that the node is lost")
    assert [body["node"] for body in site.bodies("NodeLost")] == [lost]
    site.gates.open([lost])
    job.wait_until(lambda: len(site.bodies("RanksStarted")) >= 6, "the next generation")
    assert f"NodeLost of node {lost}" in job.cli("status", NAME).stdout
    job.cli("stop", NAME, "--now")
    job.wait()
    assert site.journal()[: len(before)] == before
    terms = site.terms()
    next_term, node = terms[len(known)]
    assert next_term > term
    assert node != lost
    assert [number for number, _ in terms] == sorted({number for number, _ in terms})
    report = job.report()
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
