"""Where a node's ranks keep what torch compiles, and when that is left to torch."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from tests.waiting import PATIENCE_S

from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.plan.checkpoints import FreeSpace
from perdure.service import caches
from perdure.service.caches import FOLDERS, choose_caches, limit_caches
from perdure.service.jobfiles import set_previous_aside

SPEC = JobSpec(script="s.py")
ROOMY = FreeSpace(bytes=1 << 40, inodes=-1)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    """A job's folder on a disk with room."""
    monkeypatch.setattr(caches, "read_free_space", lambda place: ROOMY)
    root = tmp_path / "jobs" / "j"
    root.mkdir(parents=True)
    return JobPaths(str(root), str(tmp_path / "sockets" / "abc"), str(tmp_path / "memory"))


def test_all_three_lie_in_the_jobs_folder_and_nobody_else_may_look(paths: JobPaths) -> None:
    chosen = choose_caches(SPEC, paths, {"HOME": "/h"})
    place = Path(paths.compile_cache)
    assert chosen == {name: str(place / folder) for name, folder in FOLDERS.items()}
    assert all(Path(folder).is_dir() for folder in chosen.values())
    assert place.stat().st_mode & 0o777 == 0o700
    assert choose_caches(SPEC, paths, {}) == chosen  # A new agent's are the same.


@pytest.mark.parametrize("by", ["environment", "job"])
def test_what_the_user_has_said_stays(paths: JobPaths, by: str) -> None:
    def choose(**own: str) -> set[str]:
        spec = structs.replace(SPEC, env=own if by == "job" else {})
        return set(choose_caches(spec, paths, {} if by == "job" else own))

    assert choose() == set(FOLDERS)
    assert choose(PERDURE_COMPILE_CACHE="off") == set()
    for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert choose(**{name: "/mine"}) == set(FOLDERS) - {name}
    # Inductor puts Triton's below its own.
    assert choose(TORCHINDUCTOR_CACHE_DIR="/mine") == {"CUDA_CACHE_PATH"}
    assert choose(**dict.fromkeys(FOLDERS, "/mine")) == set()


def test_a_job_that_is_only_observed_is_left_alone(paths: JobPaths) -> None:
    assert choose_caches(structs.replace(SPEC, observe=True), paths, {}) == {}
    assert not Path(paths.compile_cache).exists()


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "fuse.juicefs"])
def test_on_a_shared_disk_it_lies_on_the_nodes_own(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(caches, "find_filesystem", lambda path: kind)
    chosen = choose_caches(SPEC, paths, {})
    assert chosen["TRITON_CACHE_DIR"] == paths.local_compile_cache + "/triton"
    assert not paths.local_compile_cache.startswith((paths.sockets, paths.root))
    assert not Path(paths.compile_cache).exists()


def test_a_place_that_is_not_fit_is_not_used(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = FreeSpace(bytes=1 << 30, inodes=-1)
    monkeypatch.setattr(
        caches, "read_free_space", lambda place: full if place == paths.compile_cache else ROOMY
    )
    chosen = choose_caches(SPEC, paths, {})
    assert chosen["CUDA_CACHE_PATH"] == paths.local_compile_cache + "/cuda"
    monkeypatch.setattr(caches, "read_free_space", lambda place: full)
    assert choose_caches(SPEC, paths, {}) == {}
    monkeypatch.setattr(caches, "read_free_space", lambda place: ROOMY)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(paths.compile_cache).symlink_to(elsewhere)
    local = Path(paths.local_compile_cache)
    shutil.rmtree(local)
    local.write_text("a file in its place")
    assert choose_caches(SPEC, paths, {}) == {}
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["my runs", "o'brien", 'a"b', "a\\b", "größe"])
def test_a_path_that_inductors_compiler_would_take_for_two_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Inductor has its compiler's command line split as a shell does: every compilation failed."""
    monkeypatch.setattr(caches, "read_free_space", lambda place: ROOMY)
    root = tmp_path / name / "j"
    root.mkdir(parents=True)
    sockets = tmp_path / "sockets" / "abc"
    odd = JobPaths(str(root), str(sockets), str(tmp_path / "memory"))
    local = odd.local_compile_cache
    assert choose_caches(SPEC, odd, {}) == {n: f"{local}/{f}" for n, f in FOLDERS.items()}
    assert not Path(odd.compile_cache).exists()
    both = JobPaths(str(root), str(tmp_path / name / "sockets" / "abc"), str(tmp_path / "memory"))
    assert choose_caches(SPEC, both, {}) == {}


@pytest.mark.parametrize("planted", ["sockets", "sockets/compile-cache"])
def test_below_what_somebody_else_may_rename_nothing_is_put(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str
) -> None:
    """A link, as another user may leave it in /tmp, leads to where he can write."""
    monkeypatch.setattr(caches, "find_filesystem", lambda path: "nfs4")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    (tmp_path / planted).symlink_to(elsewhere)
    assert choose_caches(SPEC, paths, {}) == {}
    assert not list(elsewhere.iterdir())


def test_nobody_else_may_write_anywhere_above_it(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "find_filesystem", lambda path: "nfs4")
    place, old = Path(paths.local_compile_cache), os.umask(0)
    try:
        place.parent.parent.mkdir(mode=0o777)
        assert choose_caches(SPEC, paths, {})
    finally:
        os.umask(old)
    for folder in (place, place.parent, place.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_in_its_place_is_neither_used_nor_emptied(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    (mine / "cuda").mkdir(parents=True)
    (mine / "cuda" / "notes").touch()
    Path(paths.compile_cache).symlink_to(mine)
    monkeypatch.setattr(caches, "FILES_MAX", 0)
    limit_caches(paths)
    assert (mine / "cuda" / "notes").exists()


def test_what_was_compiled_for_another_processor_is_not_run(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was moved: Inductor's C++ is compiled with -march=native, which SIGILL ends."""
    here = choose_caches(SPEC, paths, {})
    compiled = Path(here["TORCHINDUCTOR_CACHE_DIR"], "kernel.so")
    compiled.touch()
    limit_caches(paths)
    assert compiled.exists()
    monkeypatch.setattr(caches, "name_cpu", lambda: "another")
    elsewhere = choose_caches(SPEC, paths, {})  # Nobody knows that two machines share it.
    assert elsewhere["CUDA_CACHE_PATH"] == paths.local_compile_cache + "/cuda"
    limit_caches(paths)
    assert not compiled.exists()
    assert choose_caches(SPEC, paths, {}) == here


def test_a_processor_is_known_by_what_it_can_do_and_not_by_its_clock(tmp_path: Path) -> None:
    def name(mhz: str, flags: str, second: str = "") -> str:
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel\t\t: 17\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\n{second}"
        )
        return caches.name_cpu(str(tmp_path / "cpuinfo"))

    known = name("2596.1", "fpu avx2")
    assert known == name("3000.0", "fpu avx2", "processor\t: 1\nflags\t\t: fpu\n")
    assert known != name("2596.1", "fpu avx2 avx512f")
    assert caches.name_cpu(str(tmp_path / "none")) == caches.name_cpu(str(tmp_path / "none"))


def test_a_start_waits_for_a_look_and_a_removal_a_bounded_time(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300,000 files on a slow disk: a start stood still for as long as they took."""
    chosen, number, over = choose_caches(SPEC, paths, {}), 500, threading.Event()
    for one in range(number):
        Path(chosen["CUDA_CACHE_PATH"], str(one)).mkdir()
        Path(chosen["CUDA_CACHE_PATH"], str(one), "kernel").touch()
    lstat, looks = os.lstat, list[str]()

    def look_slowly(path: str) -> os.stat_result:
        looks.append(path)
        return lstat(path)

    with monkeypatch.context() as slow:
        slow.setattr(os, "lstat", look_slowly)
        slow.setattr(caches, "_LOOK_S", 0.1)
        # Each look takes 10 ms of this clock.
        slow.setattr(caches, "time", SimpleNamespace(monotonic=lambda: 0.01 * len(looks)))
        limit_caches(paths)
    assert 0 < len(looks) < 50
    assert len(os.listdir(chosen["CUDA_CACHE_PATH"])) == number  # Nobody knows that it is too much.
    monkeypatch.setattr(caches, "FILES_MAX", 5)
    monkeypatch.setattr(caches, "_DROP_S", 0.1)
    removed: list[bool] = []

    def remove_slowly(*args: object, **kwargs: object) -> None:
        removed.append(over.wait(PATIENCE_S))

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    limit_caches(paths)
    assert removed == [], "the start goes on before the removal has ended"
    over.set()
    assert not Path(chosen["CUDA_CACHE_PATH"]).exists()


def test_it_is_emptied_where_it_has_filled_the_disk(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made any more; to rename one needs no room."""
    chosen = choose_caches(SPEC, paths, {})
    Path(chosen["TRITON_CACHE_DIR"], "kernel").write_bytes(b"x" * 100)

    def find_no_room(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caches, "BYTES_MAX", 10)
    with monkeypatch.context() as full:
        full.setattr(os, "mkdir", find_no_room)
        limit_caches(paths)
    assert not os.listdir(paths.compile_cache)


def test_the_next_run_of_a_name_finds_it_and_it_is_not_set_aside(paths: JobPaths) -> None:
    chosen = choose_caches(SPEC, paths, {})
    kept = Path(chosen["TRITON_CACHE_DIR"], "kernel")
    kept.write_text("compiled")
    Path(paths.journal).touch()
    assert set_previous_aside(paths)
    limit_caches(paths)
    assert kept.read_text() == "compiled"
    assert not Path(paths.journal).exists()


def test_one_that_has_grown_too_large_is_emptied_before_a_run(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose_caches(SPEC, paths, {})
    for folder in chosen.values():
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "kernel").write_bytes(b"x" * 1000)
    limit_caches(paths)
    assert all(os.listdir(folder) for folder in chosen.values())
    monkeypatch.setattr(caches, "BYTES_MAX", 2500)
    limit_caches(paths)
    assert not os.listdir(paths.compile_cache)
    assert choose_caches(SPEC, paths, {}) == chosen
    monkeypatch.setattr(caches, "FILES_MAX", 2)
    for folder in chosen.values():
        Path(folder, "kernel").touch()
    limit_caches(paths)
    assert not os.listdir(paths.compile_cache)
