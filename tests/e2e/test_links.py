"""Links of two nodes' ranks, from the kernel to the journal and the screen; and a real probe."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import NodeOrder, subject_orders
from perdure.model.codec import encode
from perdure.model.orders import RunProbe
from perdure.service.jobfiles import load_endpoint
from perdure.service.jobfolders import paths_of
from tests.e2e.harness import SCRIPTS, Job

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WAIT_S = 90.0


def test_delay_matrix_names_both_ends_and_the_group_and_a_probe_measures_the_pair(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    flag = tmp_path / "stop"
    job = start("links", "--nodes", "2", "-n", "2", str(SCRIPTS / "traffic.py"), str(flag))
    noted = _wait_events(job, "LinksNoted", 1)[0]
    moved = {(s[0], s[1], s[2]): s[3] for s in noted["links"] if s[3] > 1_000_000}
    comms = {comm for _, _, comm in moved}
    assert len(comms) == 2, moved
    assert "" not in comms
    for comm in comms:
        # A ring over four ranks on two nodes, whichever way round.
        links = {(src, dst) for src, dst, name in moved if name == comm}
        assert {src for src, _ in links} == {dst for _, dst in links} == {0, 1, 2, 3}
    big, small = sorted(comms, key=lambda c: -sum(b for k, b in moved.items() if k[2] == c))
    ratio = _sum(moved, big) / _sum(moved, small)
    assert 2.5 < ratio < 6.0  # Four times the bytes; the first sweep may fall in between.

    order = RunProbe(
        id="p", round=1, pairs=((1, 0),), hosts=(0, 1), bytes=1_000_000, deadline_s=20.0, reason=""
    )
    asyncio.run(_send(job, NodeOrder(controller="test", orders=(order,))))
    ended = {e["node"]: e for e in _wait_events(job, "ProbeEnded", 2)}
    pairs = [(p[1], p[2]) for p in ended[1]["pairs"]]
    assert pairs == [(1, 0), (0, 1)]
    assert all(p[4] > 0 for p in ended[1]["pairs"])
    assert "hosts" in ended[0]

    flag.touch()
    assert job.wait() == 0, job.text()
    assert "Delay matrix (busy ms/MB" in job.cli("map", "links", "--links").stdout
    assert "Delay matrix (busy ms/MB" in job.cli("diagnose", "links").stdout


def _sum(moved: dict[tuple[int, int, str], int], comm: str) -> int:
    return sum(count for key, count in moved.items() if key[2] == comm)


async def _send(job: Job, order: NodeOrder) -> None:
    endpoint = load_endpoint(paths_of(str(job.home / "state"), "links"), "controller")
    bus = await NatsBus.connect(endpoint, name="test", timeout_s=10.0)
    try:
        await bus.publish(subject_orders("links", "all"), encode(order))
        await asyncio.sleep(0.2)  # Nothing acknowledges a publish.
    finally:
        await bus.close()


def _wait_events(job: Job, kind: str, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + WAIT_S
    journal = job.folder / "journal.jsonl"
    while time.monotonic() < deadline:
        found = []
        if journal.exists():
            for line in journal.read_text().splitlines():
                if f'"type":"{kind}"' in line:
                    found.append(json.loads(line)["body"])
        if len(found) >= count:
            return found
        time.sleep(0.2)
    raise AssertionError(f"no {count} {kind} in {WAIT_S:.0f} s: {job.text()}")
