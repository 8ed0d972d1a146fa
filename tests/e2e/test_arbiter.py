"""Two nodes and a shared folder: each way of losing one, and the folder itself."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.failover import MOUNT, NAME, Site
from tests.e2e.harness import Job
from tests.waiting import PATIENCE_S


def wait_for(site: Site, node: int, what: str, after: int) -> int:
    """Wait until the controller of `node` acts, in a term beyond `after`; return the term."""

    def acts() -> bool:
        term, who = site.terms()[-1]
        return term > after and who == node

    site.job.wait_until(acts, f"the controller of node {node} after {what}")
    return site.terms()[-1][0]


def is_quiet(site: Site) -> bool:
    """Return whether no controller begins or decides anything for twice the lease's time."""
    known = len(site.journal()), site.terms()
    time.sleep(4.0)
    return (len(site.journal()), site.terms()) == known


@pytest.mark.slow
@pytest.mark.long
def test_one_of_two_goes_on_whatever_happens_to_the_other(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOUNT, str(tmp_path / "shared"))
    site = Site(start, tmp_path, elastic=False, nodes=2, node_lost_s=10.0)
    job, arbiter = site.job, site.arbiter
    assert arbiter is not None
    job.wait_until(lambda: len(site.bodies("RanksStarted")) == 2, "two ranks")
    term, first = site.terms()[-1]
    second = 1 - first

    site.kill_node(first)
    term = wait_for(site, second, "the first node's loss", term)
    job.wait_until(lambda: site.bodies("NodeLost"), "that the node is lost")
    site.gates.open([first])
    job.wait_until(lambda: len(site.bodies("RanksStarted")) >= 4, "the next generation")
    job.wait_until(lambda: job.find(f"perdure controller {NAME} {first}"), "its controller")

    arbiter.cut(second)
    term = wait_for(site, first, "a cut from the arbiter", term)
    arbiter.join(second)

    [holder] = job.find(f"perdure controller {NAME} {first}")
    os.kill(holder.pid, signal.SIGSTOP)
    term = wait_for(site, second, "a pause", term)
    with contextlib.suppress(psutil.NoSuchProcess):
        holder.resume()
    holder.wait(PATIENCE_S)  # It acts no more.

    arbiter.take_away()
    job.wait_until(lambda: is_quiet(site), "end of all decisions while the arbiter is away")
    arbiter.bring_back()
    job.wait_until(lambda: site.terms()[-1][0] > term, "a controller when the arbiter is back")

    job.cli("stop", NAME, "--now")
    job.wait()
    numbers = [term for term, _ in site.terms()]
    assert numbers == sorted(set(numbers))
    [run] = arbiter.shared.iterdir()
    written = [path for path in (run / "journal").iterdir() if path.name.isdigit()]
    groups = sorted(written, key=lambda path: int(path.name))  # Others were cut off by a kill.
    assert [int(path.name) for path in groups] == list(range(1, len(groups) + 1))
    lines = [line for path in groups for line in path.read_text().splitlines()[1:]]
    assert [json.loads(line) for line in lines] == site.journal()
    report = job.report()
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
