"""An operator's remark, in each depth: one verb, written once."""

import json
from pathlib import Path

import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS


def find_words(depth: str, folder: Path) -> list[str]:
    """Return what `perdure run` is told, so that a job of `depth` trains until it is stopped."""
    match depth:
        case "supervised":
            return ["-n", "2", str(SCRIPTS / "train_plain.py"), str(folder)]
        case "resumable":
            script = [str(SCRIPTS / "train_settings.py"), "--steps", "100000", "--pace-s", "0.05"]
            return ["-n", "2", *script, "--trail", str(folder)]
        case "elastic":
            script = [str(SCRIPTS / "elastic.py"), "--trail", str(folder), "--steps", "100000"]
            return ["-n", "2", *script, "--pace-s", "0.05"]
        case _:
            script = [str(SCRIPTS / "torchft_groups.py"), "10000000", str(folder)]
            return ["--torchft", "--replicas", "2", "-n", "1", *script]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("depth", ["supervised", "resumable", "elastic", "torchft"])
def test_a_remark_is_in_the_report(depth: str, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "trail"
    folder.mkdir()
    job = start("n", *find_words(depth, folder))
    job.wait_state("running")
    if depth != "supervised":
        job.wait_step(3)
    empty, long = (job.cli("note", "n", text, check=False) for text in (" ", "x" * 501))
    assert (empty.returncode, long.returncode) == (2, 2)
    assert "the remark is empty" in empty.stderr
    assert "501 characters, and 500 are kept" in long.stderr
    said = json.loads(job.cli("note", "n", "new <data> from here on", "--json").stdout)
    assert said["ok"]
    assert said["step"] >= (-1 if depth == "supervised" else 3)
    assert "n: noted" in job.cli("note", "n", "and more").stdout
    notes = job.report()["notes"]
    assert [note["text"] for note in notes] == ["new <data> from here on", "and more"]
    assert notes[0]["step"] == said["step"]
    assert notes[0]["who"]
    assert "new <data> from here on" in job.cli("report", "n").stdout
    page = tmp_path / "page.html"
    job.cli("report", "n", "--html", str(page))
    assert "new &lt;data&gt; from here on" in page.read_text()
    assert "OperatorNoted" in job.cli("events", "n").stdout
    job.cli("stop", "n", "--now")
    job.wait()
