"""The node that has the lease is lost, with its server, its agent and its ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.failover import NAME, Site
from tests.e2e.harness import Job


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_another_node_goes_on_deciding(start: Callable[..., Job], tmp_path: Path) -> None:
    site = Site(start, tmp_path)
    job = site.job
    job.wait_until(lambda: all(len(site.rows(rank)) >= 5 for rank in range(3)), "steps")
    term, lost = site.terms()[-1]
    before = site.journal()
    site.kill_node(lost)
    job.wait_until(lambda: site.terms()[-1][0] > term, "the next controller")
    left = [rank for rank in range(3) if rank != lost]
    job.wait_until(
        lambda: all(site.rows(rank)[-1]["world"] == left for rank in left), "a world without it"
    )
    assert site.terms()[-1][1] != lost
    assert f"NodeLost of node {lost}" in job.cli("status", NAME).stdout
    site.gates.open([lost])
    job.wait_until(
        lambda: sum(e["body"].get("node") == lost and e["body"]["type"] == "NodeRegistered"
                    for e in site.journal()) > 1,
        "the node again",
    )  # fmt: skip
    job.cli("stop", NAME, "--now")
    job.wait()
    entries, terms = site.journal(), [term for term, _ in site.terms()]
    assert entries[: len(before)] == before
    assert terms == sorted(set(terms))
    agreed: dict[int, set[str]] = {}
    for row in (row for rank in range(3) for row in site.rows(rank)):
        agreed.setdefault(row["step"], set()).add(row["hash"])
    assert sorted(agreed) == list(range(max(agreed) + 1))
    assert all(len(hashes) == 1 for hashes in agreed.values())
    report = job.report()
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
