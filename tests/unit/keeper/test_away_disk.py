"""The disk of ranks' files is read-only for a while, as ext4 becomes after an error."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.disks import small_disk
from tests.waiting import wait_until

from perdure.keeper.ranks import Ranks
from perdure.model.bus.wire import KeeperSpawn, KeeperSpawned, KeeperWaits, RankLaunch
from perdure.model.paths import job_paths


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.parametrize("generation", [0, 1])
def test_ranks_that_have_run_before_wait_for_it(tmp_path: Path, generation: int) -> None:
    """Restarts would be used up in a second. A first start says at once what is wrong."""
    sent: list[Any] = []
    paths = job_paths(str(tmp_path), "j", str(tmp_path), str(tmp_path))
    warmth: Any = SimpleNamespace(pids=set(), why_cold="", settled=True, current=None)
    with small_disk(tmp_path / "disk", "1m") as disk:
        remount(disk, "ro")
        ranks = Ranks("j", paths, "", warmth, send=sent.append, log=lambda line: None)
        out = f"{disk}/g{generation}/rank-0"
        launch = RankLaunch(0, {}, f"{out}.out", f"{out}.err", "")
        order = KeeperSpawn(generation, (launch,), "/bin/true", (), False, True, "/", True)
        ranks.spawn(order)
        ranks.advance(time.monotonic())
        if generation == 0:
            assert [type(one) for one in sent] == [KeeperSpawned]
            assert "Read-only file system" in sent[0].why_cold
        else:
            waits = KeeperWaits(1, "Read-only file system", f"{disk}/g1")
            assert sent == [waits]
            remount(disk, "rw")
            wait_until(lambda: (ranks.advance(time.monotonic()), len(sent) == 2)[1], "a start")
            assert isinstance(sent[1], KeeperSpawned)
        os.waitpid(sent[-1].pids[0], 0)
        ranks.output.close()
        if ranks.output.pid:
            os.waitpid(ranks.output.pid, 0)  # It has the files open.
