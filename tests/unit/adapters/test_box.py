"""Facts of a machine, read from this one and from files made for it."""

from pathlib import Path

from perdure.adapters import box


def test_this_machine_is_read_and_nothing_is_left_behind(tmp_path: Path) -> None:
    facts = box.read_box(str(tmp_path / "home"), str(tmp_path))
    assert facts.system == "Linux"
    assert {disk.role for disk in facts.disks} >= {"state", "project", "temporary"}
    assert all(disk.total >= disk.free >= 0 for disk in facts.disks)
    assert 0 < facts.memory_used < facts.memory_limit
    assert facts.open_files > 0
    assert facts.ancestors
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_cgroup_without_its_cache(tmp_path: Path) -> None:
    group = tmp_path / "cg" / "job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/job\n")
    (group / "memory.max").write_text("2000000\n")
    (group / "memory.current").write_text("1500000\n")
    (group / "memory.stat").write_text("anon 900000\ninactive_file 500000\n")
    (group / "memory.events").write_text("oom 1\noom_kill 3\n")
    found = box.read_memory(str(tmp_path / "own"), str(tmp_path / "cg"))
    assert found == (2_000_000, 1_000_000, 3)


def test_scripts_of_windows_are_found(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\r\necho hello\r\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "fine.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "data.bin").write_bytes(b"\r\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.sh").write_bytes(b"\r\n")
    assert box.scan_project(str(tmp_path)) == ("run.sh",)
