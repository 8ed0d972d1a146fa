"""The cells in a real store: the first write holds, and a store that is gone says nothing."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.waiting import PATIENCE_S, wait_until

torch_dist = pytest.importorskip("torch.distributed")

from perdure.worker.cells import NoCells, OwnCells, StoreCells, open_cells  # noqa: E402

pytestmark = pytest.mark.torch


def serve():
    return torch_dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def test_the_first_write_holds_for_all_ranks():
    store = serve()
    ranks = [StoreCells("127.0.0.1", store.port) for _ in range(4)]
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


def test_a_store_that_is_gone_says_nothing():
    store = serve()
    cells = StoreCells("127.0.0.1", store.port)
    assert cells.settle("b1", "commit") == "commit"
    del store
    assert cells.read("b1") == ""
    assert cells.settle("b2", "drop") == ""


def test_ranks_without_a_store_have_no_cells(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert isinstance(open_cells(), OwnCells)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert isinstance(open_cells(), NoCells)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert isinstance(open_cells(), StoreCells)


def test_a_rank_that_is_alone_asks_no_store_unless_its_world_grows(monkeypatch):
    """Such a rank serves no store itself, and waited half an hour for one."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert isinstance(open_cells(), OwnCells)
    assert isinstance(open_cells(grows=True), StoreCells)


@pytest.mark.parametrize("written", [b"\xff", b"stop", b"Commit"])
def test_what_a_stranger_writes_into_a_cell_counts_as_drop_for_all_ranks(written):
    """torch's store has no login. Bytes that are no text ended the rank's training thread."""
    store = serve()
    stranger = torch_dist.TCPStore("127.0.0.1", store.port, is_master=False)
    stranger.set("perdure/agreed/b1", written)
    for _ in range(2):
        rank = StoreCells("127.0.0.1", store.port)
        told = []
        wait_until(
            lambda rank=rank, told=told: told.append(rank.settle("b1", "commit")) or told[-1]
        )
        assert told[-1] == "drop"
