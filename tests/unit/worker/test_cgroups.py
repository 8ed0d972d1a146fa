"""Cgroups of both versions, in a directory that looks like the kernel's."""

from pathlib import Path

import pytest

from perdure.worker.system.cgroups import (
    OomKills,
    limit_self,
    list_parent_cgroups,
    rank_name,
    read_oom_kills,
)

MARK = "71:4242"


class Tree:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path, own: str) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.own = folder / "cgroup"
        self.own.write_text(own)
        self.where = {"own": str(self.own), "root": str(self.root)}

    def add(self, path: str, kills: int = 0, control: str = "") -> Path:
        place = self.root / path
        place.mkdir(parents=True, exist_ok=True)
        name = "memory.oom_control" if path.startswith("memory") else "memory.events"
        (place / name).write_text(f"under_oom 0\noom_kill {kills}\n")
        if control:
            (place / "cgroup.subtree_control").write_text(f"{control}\n")
        return place


V1 = "4:cpu,memory:/job\n0::/\n"
V2 = "0::/slice/scope\n"


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ("0::/job\n", "job"),
        ("4:memory:/job\n0::/\n", "memory/job"),
        ("4:cpu,memory:/of/the/host\n0::/\n", "memory"),
        ("0::/job\n", "unified/job"),
    ],
)
def test_counter_is_found_where_the_version_keeps_it(tmp_path: Path, own: str, place: str) -> None:
    tree = Tree(tmp_path, own)
    tree.add(place, kills=3)
    assert read_oom_kills(**tree.where) == 3


def test_version_2_limits_beside_itself_where_memory_is_given_on(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2)
    above = tree.add("slice", control="cpu memory")
    tree.add("slice/scope")
    assert [parent.path for parent in list_parent_cgroups(**tree.where)] == [str(above)]
    (above / "cgroup.subtree_control").write_text("cpu\n")
    assert list_parent_cgroups(**tree.where) == []
    with pytest.raises(OSError, match="no memory cgroup"):
        limit_self("x", 1, **tree.where)


def test_a_limit_of_ones_own(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V1)
    tree.add("memory/job")
    name = rank_name(MARK, 2, 1)
    place = Path(limit_self(name, 4096, **tree.where))
    assert place == tree.root / "memory" / "job" / "perdure-71-4242-g2-r1"
    assert (place / "memory.limit_in_bytes").read_text() == "4096"
    assert (place / "cgroup.procs").read_text().isdecimal()


def test_each_kill_is_one_ranks(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V1)
    tree.add("memory/job", kills=5)
    kills = OomKills(MARK, **tree.where)
    assert kills.count_of(0, 0) == 0
    tree.add("memory/job", kills=6)
    assert kills.count_of(0, 0) == 1
    kills.claim()
    assert kills.count_of(0, 1) == 0
    # One in a cgroup of its own, which version 1 does not count above it.
    tree.add(f"memory/job/{rank_name(MARK, 0, 1)}", kills=1)
    assert kills.count_of(0, 1) == 1
    kills.claim()
    assert kills.count_of(0, 0) == 0
    tree.add("memory/job", kills=7)
    assert kills.count_of(0, 0) == 1


def test_what_dead_keepers_left_is_removed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V1)
    job = tree.add("memory/job")
    names = ("perdure-71-4242-g0-r0", "perdure-72-1-g0-r0", "perdure-other", "user")
    for name in names:
        (job / name).mkdir()
    OomKills(MARK, **tree.where).tidy(lambda mark: mark == MARK)
    assert sorted(p.name for p in job.iterdir() if p.is_dir()) == [names[0], names[2], names[3]]
