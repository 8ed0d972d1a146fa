"""A folder of checkpoints belongs to one job: no other job reads, removes, or adds to it."""

import errno
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

from tests.unit.worker.test_checkpoint import Trainee  # noqa: E402

from perdure.adapters.checkpoints import verify_all  # noqa: E402
from perdure.files import owner  # noqa: E402
from perdure.files.owner import claim_folder, read_owner  # noqa: E402
from perdure.model.checkpoints import OWNER  # noqa: E402
from perdure.model.errors import ConfigError  # noqa: E402
from perdure.model.records import encode_record  # noqa: E402


@pytest.fixture(params=["", "memory://"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where job `a` has saved steps 5 and 10: in a folder, or in an object store."""
    monkeypatch.setenv("PERDURE_SPEC", str(tmp_path / "a" / "job.json"))
    monkeypatch.setenv("PERDURE_JOB", "a")
    url = request.param + str(tmp_path / "ckpt")
    one = Trainee(url, seed=1)
    assert one.saver.restore({}) == 0
    for step in (5, 10):
        one.train(5)
        one.save(step)
        one.saver.close()
    become("b", tmp_path, monkeypatch)
    return url


def become(job: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a rank of `job` from here on."""
    monkeypatch.setenv("PERDURE_JOB", job)
    monkeypatch.setenv("PERDURE_SPEC", str(folder / job / "job.json"))


def test_another_job_is_refused_and_removes_nothing(place: str) -> None:
    before = verify_all(place)
    other = Trainee(place, seed=2, keep_last=1)
    with pytest.raises(ConfigError, match="holds the checkpoints of job a") as refused:
        other.saver.restore({})
    assert "checkpoint.from" in (refused.value.hint or "")
    assert verify_all(place) == before


def test_the_job_itself_goes_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("a", tmp_path, monkeypatch)
    assert Trainee(place, seed=2).saver.restore({}) == 10


def test_a_job_may_begin_from_another_jobs_checkpoint(place: str, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    other = Trainee(own, seed=2, from_=place)
    assert other.saver.restore({}) == 10
    losses = other.train(5)
    other.save(15)
    other.saver.close()
    assert [result.step for result in verify_all(place)] == [5, 10]
    again = Trainee(own, seed=3, from_=place)
    assert again.saver.restore({}) == 15, "its own checkpoint comes first"
    twin = Trainee(str(tmp_path / "twin"), seed=4, from_=place)
    assert twin.saver.restore({}) == 10
    assert twin.train(5) == losses


def test_a_start_from_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path / "own"), seed=1, from_=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="has no checkpoint"):
        one.saver.restore({})


def test_checkpoints_without_the_folders_note_have_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person copied a checkpoint of one job to another folder."""
    become("a", tmp_path, monkeypatch)
    one = Trainee(str(tmp_path / "ckpt"), seed=1)
    one.saver.restore({})
    one.save(5)
    one.saver.close()
    copied = tmp_path / "copied" / "step-00000005"
    shutil.copytree(tmp_path / "ckpt" / "step-00000005", copied)
    assert read_owner(copied.parent) == "a"
    become("b", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="of job a"):
        Trainee(str(copied.parent), seed=1).saver.restore({})


def test_checkpoints_that_a_person_removed_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder still names its job, so that its disk is not away."""
    root = tmp_path / "ckpt"
    become("a", tmp_path, monkeypatch)
    one = Trainee(str(root), seed=1)
    one.saver.restore({})
    one.save(5)
    one.saver.close()
    path = root / "step-00000005"
    saved = {"checkpoints": [{"step": 5, "path": str(path)}]}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state.json").write_bytes(encode_record(saved))
    shutil.rmtree(path)
    with pytest.raises(ConfigError, match="removed"):
        Trainee(str(root), seed=2).saver.restore({})


def test_one_of_two_claims_holds(tmp_path: Path) -> None:
    assert claim_folder(tmp_path / "new", "a") == "a"
    assert claim_folder(tmp_path / "new", "b") == "a"


def test_a_file_system_without_hard_links_can_be_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(owner, "create_file", refuse)
    assert claim_folder(tmp_path, "a") == "a"
    assert (tmp_path / OWNER).read_text() == "a"
