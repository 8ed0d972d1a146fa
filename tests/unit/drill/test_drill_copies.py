"""What a drill copies of a project."""

import os
import venv
from pathlib import Path

import pytest

from perdure.drill.copies import COPY_BYTES_MAX, check_size, copy_project, list_links
from perdure.model.errors import SafetyError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "train.py").write_text("x = 1\n")
    (folder / "src" / "a.py").write_text("y = 1\n")
    (folder / ".git" / "config").write_text("secret")
    (tmp_path / "data").mkdir()
    os.symlink("../data", folder / "data")
    os.symlink("train.py", folder / "again.py")
    os.symlink("nowhere", folder / "broken")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_copy_has_what_a_script_needs(project: Path, tmp_path: Path) -> None:
    check_size(project)
    copy_project(project, tmp_path / "copy")
    copied = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")}
    assert copied == {"train.py", "src", "src/a.py", "data", "again.py", "broken"}
    assert (tmp_path / "copy" / "data").samefile(tmp_path / "data")
    assert list_links(project) == ["data"]


def test_a_link_within_the_folder_leads_into_the_copy(project: Path, tmp_path: Path) -> None:
    copy_project(project, tmp_path / "copy")
    (tmp_path / "copy" / "again.py").write_text("changed")
    assert (project / "train.py").read_text() == "x = 1\n"


def test_an_environment_of_any_name_is_not_copied(project: Path, tmp_path: Path) -> None:
    """`python -m venv env` beside the script: torch is in it, and 256 MiB are the limit."""
    venv.create(project / "env")
    with open(project / "env" / "libtorch.so", "wb") as file:
        file.truncate(2 * COPY_BYTES_MAX)
    check_size(project)
    copy_project(project, tmp_path / "copy")
    assert not (tmp_path / "copy" / "env").exists()


def test_a_folder_that_is_too_large_is_not_copied(project: Path) -> None:
    with open(project / "model.bin", "wb") as file:
        file.truncate(COPY_BYTES_MAX)
    with pytest.raises(SafetyError, match=r"too large: model.bin \(256 MiB\)"):
        check_size(project)
