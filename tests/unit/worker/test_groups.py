"""Three real ranks, three groups: each connection gets the right name from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

from perdure.adapters.network.links import LinkReader  # noqa: E402

_RANK = """
import sys
import torch, torch.distributed as dist
from perdure.worker.recording.groups import note_groups
rank, directory = int(sys.argv[1]), sys.argv[2]
assert note_groups(f"{directory}/r{rank}.ring") and note_groups(f"{directory}/r{rank}.ring")
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
pair = dist.new_group([0, 1])
twin = dist.new_group([0, 1, 2])
names = dist.distributed_c10d._world.pg_names
print(names[dist.group.WORLD], names.get(pair, "-"), names[twin], flush=True)
for line in sys.stdin:
    dist.all_reduce(torch.ones(3_000_000), group=twin)
    print("done", flush=True)
"""


def test_groups_with_the_same_ranks_are_told_apart(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    reader = LinkReader(lambda rank: _read(tmp_path / f"r{rank}.ring.groups"), alone=True)
    try:
        # Until torch 2.11, gloo says on standard output that it is connected.
        says = [(line for line in rank.stdout if line[:6] != "[Gloo]") for rank in ranks]
        names = [next(lines).split() for lines in says]
        world, pair, twin = names[0]
        assert len({world, pair, twin}) == 3
        pids = {number: rank.pid for number, rank in enumerate(ranks)}
        assert reader.sweep(100.0, pids).sockets == 2 * (3 + 1 + 3)
        for rank in ranks:
            assert rank.stdin
            rank.stdin.write("go\n")
            rank.stdin.flush()
        assert [next(lines) for lines in says] == ["done\n"] * 3
        moved = {(s.src, s.dst): s.comm for s in reader.sweep(101.0, pids).links}
        assert set(moved.values()) == {twin}
        assert len(moved) >= 3  # A ring at least.
        comms = sorted(held.comm for held in reader._sockets.values())
        assert comms == sorted([world] * 6 + [pair] * 2 + [twin] * 6)
    finally:
        reader.close()
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _read(path: Path) -> dict[int, str]:
    return {int(port): name for port, name in json.loads(path.read_text()).items()}


def test_a_group_without_a_name_has_not_the_ranks_of_another() -> None:
    script = """
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from perdure.worker.recording.groups import read_group_timeout_s, read_members
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
mine = dist.distributed_c10d._world.pg_names[dist.group.WORLD]
assert read_members(mine) == (1, (0,)) and read_group_timeout_s(mine) > 0.0
assert read_members("") == (0, ()) and read_group_timeout_s("") == 0.0
dist.destroy_process_group()
"""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
