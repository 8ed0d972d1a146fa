"""The node that has the lease is lost, with its server, its agent and its rank.

That an elastic world trains on meanwhile is for `bench/bench_failover.py` to show: it takes longer.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.failover import NAME, Site
from tests.e2e.harness import Job


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_another_node_goes_on_deciding(start: Callable[..., Job], tmp_path: Path) -> None:
    site = Site(start, tmp_path, elastic=False)
    job = site.job
    job.wait_until(lambda: len(site.bodies("RanksStarted")) == 3, "three ranks")
    [(term, lost)] = site.terms()
    before = site.journal()
    site.kill_node(lost)
    job.wait_until(lambda: len(site.terms()) > 1, "the next controller")
    job.wait_until(lambda: site.bodies("NodeLost"), "that the node is lost")
    assert [body["node"] for body in site.bodies("NodeLost")] == [lost]
    site.gates.open([lost])
    job.wait_until(lambda: len(site.bodies("RanksStarted")) >= 6, "the next generation")
    assert f"NodeLost of node {lost}" in job.cli("status", NAME).stdout
    job.cli("stop", NAME, "--now")
    job.wait()
    assert site.journal()[: len(before)] == before
    terms = site.terms()
    assert terms[1][0] > term
    assert terms[1][1] != lost
    assert [number for number, _ in terms] == sorted({number for number, _ in terms})
    report = job.report()
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
