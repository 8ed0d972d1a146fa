"""Two jobs with one `checkpoint.url`: the second is refused, and may begin from the first's."""

from pathlib import Path

import pytest

from perdure.adapters.checkpoints import verify_all
from tests.e2e.exact import SCRIPT, Start

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def write_job(folder: Path, name: str, steps: int, **keys: str) -> str:
    """Write the job file of a script that makes `steps` steps; return its path."""
    (folder / name).mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    rows = "\n".join(f'{key} = "{value}"' for key, value in keys.items())
    path.write_text(
        f'script = "{SCRIPT}"\nargs = ["--trail", "{folder / name}", "--steps", "{steps}"]\n'
        f"nproc = 1\n[checkpoint]\nevery_steps = 10\n{rows}\n"
    )
    return str(path)


def test_a_second_job_in_the_folder_is_refused_and_may_begin_from_it(
    start: Start, tmp_path: Path
) -> None:
    shared = str(tmp_path / "shared")
    first = start("first", "-c", write_job(tmp_path, "first", 30, url=shared))
    assert first.wait() == 0, first.text()
    before = verify_all(shared)

    second = start("second", "-c", write_job(tmp_path, "second", 50, url=shared))
    assert second.wait() == 2, second.text()
    assert f"{shared} holds the checkpoints of job first" in second.text()
    assert "hint: set checkpoint.url to another folder" in second.text()
    assert verify_all(shared) == before

    own = str(tmp_path / "own")
    third = start("third", "-c", write_job(tmp_path, "third", 50, url=own, **{"from": shared}))
    assert third.wait() == 0, third.text()
    assert verify_all(shared) == before
    assert [result.step for result in verify_all(own)] == [40, 50], "it began at step 30"


@pytest.mark.long
def test_a_rank_refuses_what_the_command_cannot_see(start: Start, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "owner").write_text("other")
    job = start("late", "-c", write_job(tmp_path, "late", 30, url=f"file://{shared}"))
    assert job.wait() != 0
    assert "holds the checkpoints of job other" in job.text()
