"""The cells in a real store: the first write holds, and a store that is gone says nothing."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from tests.waiting import PATIENCE_S, wait_until

torch_dist = pytest.importorskip("torch.distributed")

from perdure.worker.steering import cells as module  # noqa: E402
from perdure.worker.steering.cells import Away, Cells, StoreCells, open_cells  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A store that is there may answer late here."""
    monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)


def serve():
    return torch_dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def connect(store):
    cells = StoreCells(lambda: f"127.0.0.1:{store.port}")
    cells.open()
    return cells


def test_the_first_write_holds_for_all_ranks():
    store = serve()
    ranks = [connect(store) for _ in range(4)]
    fates = ["commit", "drop", "drop", "commit"]
    for number in range(20):
        assert ranks[0].read(f"b{number}") == ""
        with ThreadPoolExecutor(4) as pool:
            told = pool.map(
                lambda rank, fate, id_=f"b{number}": rank.settle(id_, fate),
                ranks, fates, timeout=PATIENCE_S,
            )  # fmt: skip
            (settled,) = set(told)
        assert settled in ("commit", "drop")
        assert {rank.read(f"b{number}") for rank in ranks} == {settled}


@pytest.mark.parametrize("served", [True, False])
def test_votes_and_questions_reach_the_others(served):
    store = serve() if served else None
    first, second = [connect(store) for _ in range(2)] if served else [Cells()] * 2
    assert second.asked() == ""
    first.ask("b1")
    wait_until(lambda: second.asked() == "b1")  # A store answers no write.
    assert not first.vote("b1", 0, (0, 1))
    assert not first.vote("b1", 0, (0, 1)), "a vote counts once"
    wait_until(lambda: second.vote("b1", 1, (0, 1)))
    assert second.read("b1") == ""


def test_a_store_that_is_gone_is_away_and_the_next_one_is_found():
    stores = [serve(), serve()]
    cells = StoreCells(lambda: f"127.0.0.1:{ports[0]}")
    ports = [store.port for store in stores]
    cells.open()
    assert cells.settle("b1", "commit") == "commit"
    stores.pop(0)
    with pytest.raises(Away):
        cells.read("b1")
    with pytest.raises(Away):
        cells.open()
    assert cells._store is None
    ports.pop(0)
    assert cells.open() == f"127.0.0.1:{ports[0]}"
    assert cells.read("b1") == ""


def read(cells, id_):
    cells.open()
    return cells.read(id_)


_SERVER = """
import sys
import torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_whose_process_has_stopped_holds_up_nobody(monkeypatch):
    """torch itself waits for its answer without a limit."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        port = int(server.stdout.readline())
        cells = StoreCells(lambda: f"127.0.0.1:{port}")
        cells.open()
        assert cells.settle("b1", "commit") == "commit"
        os.kill(server.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(server.pid).status() == "stopped", "the stop")
        monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
        left = threading.active_count()
        for _ in range(5):
            with pytest.raises(Away):
                read(cells, "b1")
        assert threading.active_count() <= left + 2, "one that waits, and one that connects"
        os.kill(server.pid, signal.SIGCONT)
        monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
        wait_until(lambda: cells._left.done(), "an answer after all")
        assert read(cells, "b1") == "commit"
    finally:
        server.kill()
        server.communicate(timeout=PATIENCE_S)


def test_ranks_without_a_store_have_no_cells(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert type(open_cells()) is Cells, "such a rank serves no store"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert isinstance(open_cells(), StoreCells)
    monkeypatch.delenv("MASTER_PORT")
    assert open_cells() is None


@pytest.mark.parametrize("written", [b"\xff", b"stop", b"Commit"])
def test_what_a_stranger_writes_into_a_cell_counts_as_drop_for_all_ranks(written):
    """torch's store has no login. Bytes that are no text ended the rank's training thread."""
    store = serve()
    stranger = torch_dist.TCPStore("127.0.0.1", store.port, is_master=False)
    stranger.set("perdure/agreed/b1", written)
    for _ in range(2):
        rank = connect(store)
        assert rank.settle("b1", "commit") == rank.read("b1") == "drop"
