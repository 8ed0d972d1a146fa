"""Flight Recorder's traces on disk: whole, bounded, and with what the analyzer needs."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.orders import TakeStacks
from perdure.worker.recording import recorder as traces
from perdure.worker.recording.recorder import TraceWriter


class Source:
    """Flight Recorder as it answers."""

    def __init__(self, **trace: Any) -> None:
        self.trace: dict[str, Any] = {"version": "2.10", "entries": [{"record_id": 0}]} | trace
        self.asked: list[bool] = []

    def dump(self, collectives: bool, stacks: bool) -> bytes:
        assert collectives
        self.asked.append(stacks)
        return pickle.dumps(self.trace | {"stacks": stacks})


def make_writer(directory: Path, source: Source) -> TraceWriter:
    return TraceWriter(
        rank=3,
        generation=1,
        directory=str(directory),
        dumps={"gloo": source.dump},
        groups=lambda: {"0": ("default_pg", (0, 1, 3))},
    )


def test_trace_without_stacks_is_replaced_by_one_with_them(tmp_path: Path) -> None:
    source = Source()
    make_writer(tmp_path, source).write()
    assert source.asked == [False, True]
    trace = pickle.loads((tmp_path / "gloo" / "rank_3").read_bytes())
    assert trace["stacks"] is True
    assert trace["pg_config"] == {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 3]"}}
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["rank_3"]


def test_what_the_source_says_of_a_group_stays(tmp_path: Path) -> None:
    source = Source(pg_config={"0": {"desc": "its own", "ranks": "[0]"}})
    make_writer(tmp_path, source).write()
    trace = pickle.loads((tmp_path / "gloo" / "rank_3").read_bytes())
    assert trace["pg_config"]["0"]["desc"] == "its own"


def test_nothing_recorded_is_nothing_written(tmp_path: Path) -> None:
    make_writer(tmp_path, Source(entries=[])).write()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "BYTES_MAX", 100)
    make_writer(tmp_path, Source(entries=["x" * 100])).write()
    assert list(tmp_path.iterdir()) == []


def test_order_of_another_generation_is_not_for_this_rank(tmp_path: Path) -> None:
    source = Source()
    make_writer(tmp_path, source).handle(TakeStacks(generation=0, ranks=(0,), reason="test"))
    assert source.asked == []


def test_traces_of_generations_long_past_are_removed(tmp_path: Path) -> None:
    for generation in range(7):
        for rank in (2, 3) if generation == 0 else (3,):
            writer = TraceWriter(
                rank=rank,
                generation=generation,
                directory=str(tmp_path / f"g{generation}"),
                dumps={"gloo": Source().dump},
                groups=dict,
            )
            writer.write()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("rank_*"))
    assert left == ["g0/gloo/rank_2"] + [
        f"g{generation}/gloo/rank_3" for generation in (3, 4, 5, 6)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g0", "g3", "g4", "g5", "g6"]


REAL = """
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist
from perdure.worker.recording.groups import list_process_groups
from perdure.worker.recording.recorder import TraceWriter, list_dumps

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
TraceWriter(
    rank=0,
    generation=0,
    directory=sys.argv[1] + "/g0",
    dumps=list_dumps(),
    groups=list_process_groups,
).write()
print(sorted(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor")))
assert find_spec("torch._inductor") is not None  # Only the writer goes without.
dist.destroy_process_group()
"""


def test_a_healthy_rank_imports_nothing_for_its_trace(tmp_path: Path) -> None:
    """What compiles takes seconds to import, during which a busy host's rank looked at work."""
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)],
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
    assert "is not needed here" not in done.stderr
    (entry,) = pickle.loads((tmp_path / "g0" / "gloo" / "rank_0").read_bytes())["entries"]
    assert any(frame["filename"] == "<string>" for frame in entry["frames"])
