"""Links of two nodes' ranks, from the kernel to the journal and the screen; and a real probe."""

import asyncio
import json
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
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LEAST = 60_000_000
"""Bytes of ten of the smaller collectives, on all four links of a ring."""


def test_delay_matrix_names_both_ends_and_the_group_and_a_probe_measures_the_pair(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    flag = tmp_path / "stop"
    job = start("links", "--nodes", "2", "-n", "2", str(SCRIPTS / "traffic.py"), str(flag))
    job.wait_until(
        lambda: sum(count > LEAST for count in _sums(_find_moved(job)).values()) == 2, "traffic"
    )
    moved = _find_moved(job)
    comms = set(_sums(moved))
    assert len(comms) == 2, moved
    assert "" not in comms
    for comm in comms:
        # A ring over four ranks on two nodes, whichever way round.
        links = {(src, dst) for src, dst, name in moved if name == comm}
        assert {src for src, _ in links} == {dst for _, dst in links} == {0, 1, 2, 3}
    small, big = sorted(_sums(moved).values())
    assert 2.5 < big / small < 6.0  # Four times the bytes; a sweep may fall in between.

    order = RunProbe(
        id="p", round=1, pairs=((1, 0),), hosts=(0, 1), bytes=1_000_000, deadline_s=250.0, reason=""
    )
    asyncio.run(_send(job, NodeOrder(controller="test", term=1, orders=(order,))))
    ended = {e["node"]: e for e in _wait_events(job, "ProbeEnded", 2)}
    pairs = [(p[1], p[2]) for p in ended[1]["pairs"]]
    assert pairs == [(1, 0), (0, 1)]
    assert all(p[4] > 0 for p in ended[1]["pairs"])
    assert "hosts" in ended[0]

    flag.touch()
    assert job.wait() == 0, job.text()
    assert "Delay matrix (busy ms/MB" in job.cli("status", "links", "--links").stdout
    assert "Delay matrix (busy ms/MB" in job.cli("diagnose", "links").stdout


def _find_moved(job: Job) -> dict[tuple[int, int, str], int]:
    """Return the bytes that were noted so far, by source, destination and communicator."""
    moved: dict[tuple[int, int, str], int] = {}
    for noted in _find_events(job, "LinksNoted"):
        for src, dst, comm, count, *_ in noted["links"]:
            moved[src, dst, comm] = moved.get((src, dst, comm), 0) + count
    return {link: count for link, count in moved.items() if count > 1_000_000}


def _sums(moved: dict[tuple[int, int, str], int]) -> dict[str, int]:
    """Return the bytes of each communicator."""
    sums: dict[str, int] = {}
    for (_, _, comm), count in moved.items():
        sums[comm] = sums.get(comm, 0) + count
    return sums


async def _send(job: Job, order: NodeOrder) -> None:
    endpoint = load_endpoint(paths_of(str(job.home / "state"), "links"), "controller")
    bus = await NatsBus.connect(endpoint, name="test", timeout_s=PATIENCE_S)
    try:
        await bus.publish(subject_orders("links", "all"), encode(order))
        await bus.client.flush(timeout=PATIENCE_S)  # Nothing acknowledges a publish.
    finally:
        await bus.close()


def _find_events(job: Job, kind: str) -> list[dict[str, Any]]:
    journal = job.folder / "journal.jsonl"
    text = journal.read_text() if journal.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if f'"type":"{kind}"' in line]
    return [json.loads(line)["body"] for line in lines if line.endswith("\n")]


def _wait_events(job: Job, kind: str, count: int) -> list[dict[str, Any]]:
    job.wait_until(lambda: len(_find_events(job, kind)) >= count, f"{count} {kind}")
    return _find_events(job, kind)
