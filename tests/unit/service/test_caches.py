"""Where a node's ranks keep what torch compiles, and when that is left to torch."""

import os
import shutil
from pathlib import Path

import pytest
from msgspec import structs

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
