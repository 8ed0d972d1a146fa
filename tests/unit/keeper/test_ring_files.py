"""Where rings lie, and how long."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.files.private import make_private
from perdure.keeper import ranks as module
from perdure.keeper.ranks import Ranks
from perdure.model.bus.wire import KeeperSpawn, RankLaunch
from perdure.model.paths import job_paths


def test_a_rank_stores_into_no_file_of_the_state_directory() -> None:
    """That may be on a network disk: while it hangs, the store would wait, and the training."""
    paths = job_paths("/home/me/.perdure", "j", "/tmp/perdure-1", "/dev/shm/perdure-1")
    assert Path(paths.sockets) in Path(paths.ring(0, 0)).parents
    assert Path(paths.root) not in Path(paths.ring(0, 0)).parents


@pytest.mark.parametrize(("kept_s", "left"), [(0.0, ["g2-r0.ring"]), (600.0, None)])
def test_rings_of_ranks_that_ended_long_ago_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_s: float, left: list[str] | None
) -> None:
    monkeypatch.setattr(module, "_RING_KEPT_S", kept_s)
    paths = job_paths(str(tmp_path), "j", str(tmp_path / "private"), str(tmp_path / "shared"))
    folder = Path(paths.ring(0, 0)).parent
    for one in (*reversed(folder.parents[:2]), folder):
        make_private(str(one))
    warmth: Any = SimpleNamespace(pids=set(), why_cold="", settled=True, current=None)
    ranks = Ranks("j", paths, "", warmth, send=lambda message: None, log=lambda line: None)
    for generation in (1, 2):
        out, ring = f"{tmp_path}/g{generation}", paths.ring(generation, 0)
        launch = RankLaunch(0, {}, f"{out}.out", f"{out}.err", ring)
        ranks.spawn(KeeperSpawn(generation, (launch,), "/bin/true", (), False, True, "/", True))
        ranks.advance(time.monotonic())
        Path(f"{ring}.groups").touch()
        pid, status, usage = os.wait4(ranks.alive[0], 0)
        ranks.note_exit(pid, status, usage)
        ranks.advance(time.monotonic())
    ranks.output.close()
    os.waitpid(ranks.output.pid, 0)
    every = [f"g{number}-r0.ring{more}" for number in (1, 2) for more in ("", ".groups")]
    expected = sorted(every) if left is None else [*left, "g2-r0.ring.groups"]
    assert sorted(path.name for path in folder.iterdir()) == expected
