"""The cells in a real store: the first write holds, and a store that is gone says nothing."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.waiting import PATIENCE_S

torch_dist = pytest.importorskip("torch.distributed")

from perdure.worker.cells import Away, OwnCells, StoreCells, open_cells  # noqa: E402

pytestmark = pytest.mark.torch


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
    first, second = [connect(store) for _ in range(2)] if served else [OwnCells()] * 2
    assert second.asked() == ""
    first.ask("b1")
    assert second.asked() == "b1"
    assert not first.vote("b1", 0, (0, 1))
    assert not first.vote("b1", 0, (0, 1)), "a vote counts once"
    assert second.vote("b1", 1, (0, 1))
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


def test_ranks_without_a_store_have_no_cells(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert isinstance(open_cells(), OwnCells), "such a rank serves no store"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert isinstance(open_cells(), StoreCells)
    monkeypatch.delenv("MASTER_PORT")
    assert open_cells() is None
