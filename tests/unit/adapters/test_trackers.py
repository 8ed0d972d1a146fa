"""Each tracker by its own library, and read again by its own reader."""

import math
from pathlib import Path

import pytest
from tests.trackers import read_mlflow, read_tensorboard, read_wandb, read_wandb_records

from perdure.adapters import exporters, trackers
from perdure.adapters.trackers import Place, Row, open_tracker
from perdure.model.errors import PlatformError
from perdure.telemetry.marks import Mark

pytestmark = pytest.mark.filterwarnings("ignore")  # The libraries' own.

ROWS: list[Row] = [
    (1, {"loss": 2.0}, 100.0),
    (2, {"loss": math.nan, "lr": 0.1}, 101.0),
    (10**30, {"a\x1b[31m\ud800" + "n" * 300: 1e300, "b{c}": math.inf}, 102.0),
    (-1, {"perdure/goodput": 0.5}, 103.0),
    (4, {"": 1.0, "train//loss/": 1.0, "..": 1.0, "/abs": 1.0, "100 * error*": 1.0}, 104.0),
]
"""Poison: a step, names and values that no tracker has seen, or that one of them refuses."""
MARKS = [
    Mark(4, "setting", 101.5, 2, "lr 0.1 -> 0.5 from step 2 on, by ann", {}),
    Mark(9, "incident", 102.5, 3, "rank 1: signal 9; restart", {"seconds_lost": 1.5}),
]
NUMBERED = list(enumerate(MARKS, 1))


def place(folder: Path, target: str, **environ: str) -> Place:
    return Place(target, "job", "0123456789ab", str(folder), environ)


def tell(kind: str, where: Place) -> str:
    tracker = open_tracker(kind, where)
    tracker.put(ROWS, NUMBERED)
    tracker.put([], [])
    tracker.close("done")
    return tracker.run


def test_tensorboard_shows_marks_as_text_beside_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tell("tensorboard", place(tmp_path, str(tmp_path)))
    assert run == str(tmp_path / "perdure-job")
    shown = read_tensorboard(tmp_path / "perdure-job")
    assert (2, "perdure/setting", MARKS[0].text) in shown
    assert (3, "perdure/incident", MARKS[1].text) in shown
    assert (3, "perdure/incident_seconds_lost", 1.5) in shown
    assert next((step, value) for step, tag, value in shown if tag == "loss") == (1, 2.0)
    assert len(shown) == 11 + 1 + 2  # Values, what an incident has of numbers, texts.


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(PlatformError, match="cannot write"):
        open_tracker("tensorboard", place(tmp_path, str(tmp_path / "file")))


@pytest.mark.long
def test_weights_and_biases_has_them_in_a_run_of_the_scripts_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    where = place(tmp_path, "team/project", WANDB_MODE="offline", WANDB_RUN_ID="theirs")
    run = tell("wandb", where)
    again = tell("wandb", where._replace(run=run, times=1))
    assert (run, again) == ("perdure-0123456789ab", "perdure-0123456789ab-1")
    rows = read_wandb(tmp_path)
    settings = [row for row in rows if "perdure/setting" in row]
    assert [(row["perdure/setting"], row["perdure/step"]) for row in settings] == [
        (MARKS[0].text, 2)
    ] * 2
    (lost, _) = [row for row in rows if "perdure/incident_seconds_lost" in row]
    assert (lost["perdure/incident_seconds_lost"], lost["perdure/mark"]) == (1.5, 2)
    assert next(row["loss"] for row in rows if "loss" in row) == 2.0
    assert next(row["100 _ error_"] for row in rows if "100 _ error_" in row) == 1.0
    runs = [r.run for r in read_wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    made = [(r.entity, r.project, r.run_group, r.job_type, r.display_name) for r in runs]
    assert set(made) == {("team", "project", "job", "perdure", "job")}
    assert {c.key: c.value_json for c in runs[0].config.update}["script_run_id"] == '"theirs"'


@pytest.mark.long
def test_mlflow_has_them_in_one_run_however_often_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url = f"file:{tmp_path / 'runs'}"
    where = place(tmp_path, url)
    run = tell("mlflow", where)
    assert tell("mlflow", where) == run  # Whoever died before it was written down finds it.
    found, history = read_mlflow(url, run)
    assert found.info.status == "FINISHED"
    tags = {k: v for k, v in found.data.tags.items() if k.startswith("perdure.mark")}
    assert tags == {
        "perdure.mark.000": f"setting: {MARKS[0].text}",
        "perdure.mark.001": f"incident: {MARKS[1].text}",
    }
    assert set(history["perdure/incident_seconds_lost"]) == {(3, 1.5)}
    assert (2, 0.1) in history["lr"]
    assert {"_", "train/_loss_", "_abs"} <= set(history)
    assert tell("mlflow", place(tmp_path, url, MLFLOW_RUN_ID=run)) == run


@pytest.mark.long
def test_a_refusal_is_told_without_what_is_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "sesame-open")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(PlatformError) as caught:
        open_tracker("mlflow", place(tmp_path, "http://ann:sesame-open@127.0.0.1:1/x"))
    assert "sesame" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_what_is_missing_is_said_with_what_installs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(exporters.importlib, "import_module", missing)
    with pytest.raises(PlatformError, match="is not installed") as caught:
        open_tracker(kind, place(tmp_path, "x"))
    assert f"perdure[{kind}]" in caught.value.hint


def test_who_has_not_logged_in_is_told_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not trackers._knows_key({})
    assert trackers._knows_key({"WANDB_API_KEY": "k"})
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine wandb.own login user password k\n")
    netrc.chmod(0o600)
    assert trackers._knows_key({"WANDB_BASE_URL": "https://wandb.own/"})
    assert not trackers._knows_key({})
