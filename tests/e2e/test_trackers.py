"""A real job is told to trackers while it runs; what their own readers show of it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import find_port
from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job
from tests.trackers import read_mlflow, read_tensorboard, read_wandb
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SECRET = "0123456789abcdef0123456789abcdef01234567"


def start_job(start: Start, tmp_path: Path, tracking: str, *, pace_s: float = 0.15) -> Job:
    trail = tmp_path / "trail"
    trail.mkdir()
    config = tmp_path / "t.toml"
    config.write_text(f"[checkpoint]\nevery_steps = 20\n[tracking]\nevery_s = 0.5\n{tracking}\n")
    script = [str(SCRIPTS / "train_settings.py"), "--steps", "100000", "--pace-s", str(pace_s),
              "--trail", str(trail)]  # fmt: skip
    job = start("t", "-n", "2", "-c", str(config), *script)
    job.wait_step(3)
    return job


def befall(job: Job) -> None:
    """Change a setting, remark, kill a rank, and see the job train again."""
    job.cli("set", "t", "lr=0.5", "--why", "plateau")
    job.cli("note", "t", "looks fine")
    job.wait_step(job.state()["step"] + 2)
    os.kill(job.state()["ranks"][1]["pid"], signal.SIGKILL)
    job.wait_until(lambda: job.state().get("generation") == 1, "generation 1")
    job.wait_until(
        lambda: any(r["total_s"] is not None for r in job.state()["recent"]), "its recovery"
    )


def check_texts(told: dict[str, list[str]]) -> None:
    """See that each mark was told once, with all that it says."""
    (setting,), (remark,), (failure,) = (told[k] for k in ("setting", "remark", "failure"))
    assert setting.startswith("lr 0.1 -> 0.5 from step ")
    assert setting.endswith(": plateau")
    assert remark.endswith("looks fine")
    assert failure == "rank 1 failed: signal 9 (SIGKILL)"
    (incident,) = told["incident"]
    assert incident.startswith("rank 1: signal 9 (SIGKILL) at step ")
    assert "; restart, " in incident
    assert " s lost" in incident


def by_kind(rows: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tag, text in rows:
        found.setdefault(tag.removeprefix("perdure/"), []).append(text)
    return found


def count_texts(folder: Path) -> int:
    return sum(map(len, list_told(folder).values()))


def count_noted(folder: Path) -> int:
    """Return how many marks perdure has written down as told."""
    return int(json.loads((folder / "perdure.json").read_text()).get("marks", 0))


def list_told(folder: Path) -> dict[str, list[str]]:
    shown = read_tensorboard(folder)
    return by_kind([(tag, text) for _, tag, text in shown if isinstance(text, str)])


def test_tensorboard_shows_it_live_and_once_though_a_controller_dies(
    start: Start, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    job = start_job(start, tmp_path, 'tensorboard = "boards"\nrun_log = true')
    folder = tmp_path / "boards" / "perdure-t"
    befall(job)
    wait_until(lambda: "incident" in list_told(folder), "the incident, while it runs")
    # A controller that dies before it has written down what it told tells that again.
    wait_until(lambda: count_noted(folder) >= count_texts(folder), "what was told")
    old = job.kill("perdure controller")
    job.wait_until(
        lambda: any(p.pid != old for p in job.find("perdure controller")), "another controller"
    )
    job.cli("note", "t", "after it")
    wait_until(lambda: len(list_told(folder).get("remark", ())) == 2, "what came later")
    job.cli("stop", "t")
    assert job.wait() == 0
    told = list_told(folder)
    assert told.pop("remark")[1].endswith("after it")
    assert [text for text in told.pop("part")] != []
    assert told.pop("ended") == ["stopped, exit code 0: " + told_reason(job)]
    check_texts({**told, "remark": ["looks fine"]})
    shown = read_tensorboard(folder)
    tags = {tag for _, tag, _ in shown}
    assert {"perdure/goodput", "perdure/ranks_alive", "lr"} <= tags
    assert max(value for _, tag, value in shown if tag == "perdure/ranks_alive") == 2.0
    told_lr = [(step, value) for step, tag, value in shown if tag == "lr"]
    assert {round(float(value), 6) for _, value in told_lr} == {0.1, 0.5}
    assert [note["text"] for note in job.report()["notes"]] == ["looks fine", "after it"]
    again = json.loads(
        job.cli("metrics", "t", "--tensorboard", str(tmp_path / "boards"), "--json").stdout
    )
    assert (again["tensorboard_marks"], again["tensorboard_rows"]) == (0, 0)


def told_reason(job: Job) -> str:
    return str(job.state()["reason"])


@pytest.mark.long
@pytest.mark.parametrize("depth", ["elastic", "torchft"])
def test_jobs_that_lose_no_world_are_told_of_alike(
    start: Start, tmp_path: Path, depth: str
) -> None:
    pytest.importorskip("tensorboard")
    trail = tmp_path / "trail"
    trail.mkdir()
    (tmp_path / "t.toml").write_text('[tracking]\nevery_s = 0.5\ntensorboard = "boards"\n')
    words = ["-n", "3", str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "100000"]
    if depth == "torchft":
        pytest.importorskip("torchft")
        words = ["--torchft", "--replicas", "3", "-n", "1", str(SCRIPTS / "torchft_groups.py")]
        words += ["10000000", str(trail)]
    job = start("t", "-c", str(tmp_path / "t.toml"), *words)
    job.wait_step(30)
    victim = job.state()["ranks"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    folder = tmp_path / "boards" / "perdure-t"
    wait_until(lambda: "incident" in list_told(folder), "the incident, while it runs")
    job.cli("stop", "t", "--now")
    job.wait()
    told = list_told(folder)
    assert len(told["incident"]) == 1, told
    assert "signal 9 (SIGKILL)" in told["incident"][0]
    assert len(told["ended"]) == 1
    shown = read_tensorboard(folder)
    alive = [value for _, tag, value in shown if tag == "perdure/ranks_alive"]
    assert max(alive) == 3.0
    goodput = [float(value) for _, tag, value in shown if tag == "perdure/goodput"]
    assert goodput
    assert all(0.0 <= value <= 1.0 for value in goodput)


@pytest.mark.long
def test_a_tracker_that_cannot_be_told_costs_the_job_nothing(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "boards").touch()  # No folder can be made there.
    job = start_job(start, tmp_path, f'tensorboard = "{tmp_path}/boards"')
    log = job.folder / "logs" / "controller.log"
    wait_until(lambda: "tensorboard: cannot write" in log.read_text(), "the warning")
    befall(job)
    job.cli("stop", "t")
    assert job.wait() == 0
    assert log.read_text().count("it is tried again") == 1


@contextmanager
def hang() -> Iterator[int]:
    """Listen, and answer nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.long
def test_servers_that_hang_and_refuse_cost_the_end_what_was_allowed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with hang() as port:
        job = start_job(
            start,
            tmp_path,
            f'mlflow = "http://127.0.0.1:{port}"\nwandb = "p"\ntimeout_s = 8',
        )
        log = job.folder / "logs" / "controller.log"
        wait_until(lambda: "wandb took nothing" in log.read_text(), "one warning")
        wait_until(lambda: "mlflow took nothing" in log.read_text(), "the other one")
        befall(job)
        job.cli("stop", "t")
        assert job.wait() == 0
    files = [path for path in job.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not list(job.folder.glob("tracking/wandb/run-*"))


@pytest.mark.long
def test_weights_and_biases_has_it_offline_with_no_secret_in_the_jobs_files(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    job = start_job(start, tmp_path, 'wandb = "team/project"\nrun_log = true')
    befall(job)
    job.cli("stop", "t")
    assert job.wait() == 0
    rows = read_wandb(job.folder / "tracking")
    marks = [row for row in rows if "perdure/mark" in row]
    numbers = [row["perdure/mark"] for row in marks]
    assert numbers == list(range(1, len(marks) + 1))
    texts = [(k, v) for row in marks for k, v in row.items() if isinstance(v, str)]
    check_texts(by_kind(texts))
    (cost,) = [row for row in rows if "perdure/incident_seconds_lost" in row]
    assert cost["perdure/incident_seconds_lost"] > 0
    assert {row["lr"] for row in rows if "lr" in row} == {0.1, 0.5}
    files = [path for path in job.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@contextmanager
def serve_mlflow(folder: Path) -> Iterator[str]:
    """Serve MLflow over HTTP, with SQLite behind it."""
    port = find_port()
    database = f"sqlite:///{folder}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1",
               "--port", str(port), "--backend-store-uri", database]  # fmt: skip
    with open(folder / "mlflow.out", "wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=folder, start_new_session=True
        )
    try:
        wait_until(lambda: answers(port), "MLflow's server")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_an_mlflow_server_has_it_in_the_run_that_the_user_names(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow.server")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    with serve_mlflow(tmp_path) as url:
        client = MlflowClient(tracking_uri=url)
        theirs = client.create_run(client.create_experiment("mine")).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
        job = start_job(start, tmp_path, f'mlflow = "{url}"')
        befall(job)

        def is_told() -> bool:
            found, _ = read_mlflow(url, theirs)
            return any(text.startswith("incident: ") for text in found.data.tags.values())

        wait_until(is_told, "the incident, while it runs")
        job.cli("stop", "t")
        assert job.wait() == 0
        found, history = read_mlflow(url, theirs)
        assert found.info.status == "RUNNING"  # It is the user's to end.
        marks = {k: v for k, v in found.data.tags.items() if k.startswith("perdure.mark.")}
        told: dict[str, Any] = by_kind([tuple(text.split(": ", 1)) for text in marks.values()])
        check_texts(told)
        assert len(history["perdure/incident_seconds_lost"]) == 1
        assert max(value for _, value in history["perdure/ranks_alive"]) == 2.0
