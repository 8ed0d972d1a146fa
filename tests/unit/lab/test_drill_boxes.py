"""A drill on boxes: what is launched in the user's place, and what a box does when nobody asks."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.drill.test_drill_job import make_row, make_snapshot
from tests.waiting import PATIENCE_S, wait_until

from perdure.drill import onbox
from perdure.drill.onbox import Kept
from perdure.drill.planning import FAULTS, Act, keep_first, plan_acts
from perdure.drill.rehearsal import aim
from perdure.launch.catalog import load_profile, overlay
from perdure.launch.channel import Channel, Done
from perdure.launch.wheel import read_program
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.profile import Profile
from perdure_lab.drill.boxes import GUARD, REMOVE, give_order, name_run, plan_run

NAME = "gpt-drill-0a1b2c"
HOSTS = ("gpu-a", "gpu-b")


def make_profile(**values: object) -> Profile:
    named = {"launch.hosts": HOSTS, "interruption.relaunch": "cron", **values}
    return overlay(load_profile("generic-ssh", "/nonexistent"), named, "test").profile


def test_all_of_a_start_is_below_its_own_name() -> None:
    launch = LaunchConfig(project="/p", secrets=("HF_TOKEN", "WANDB_API_KEY"))
    spec = JobSpec(
        name="gpt", script="train.py", nodes=2, launch=launch, env={"WANDB_API_KEY": "k"}
    )
    plan = plan_run(spec, make_profile(), NAME, Kept(confined=True, switches=True))
    for each, folder, before in (
        (plan, NAME, "run"), (plan.others[0], f"{NAME}+gpu-b", "node"),
    ):  # fmt: skip
        env = each.files["env.sh"]
        assert f'export DURABLE_DIR="$HOME/perdure/{NAME}"\n' in env
        assert f'export JOB_DIR="$DATA_DIR/{folder}"\n' in env
        assert f'export CRED_FILE="$HOME/.perdure-credentials-{folder}"\n' in env
        command = json.loads(each.files["settings.json"])["command"]
        assert command[:5] == ["$PERDURE_PYTHON", "-P", "-m", "perdure.drill.onbox", "keep"]
        assert command[5:10] == ["$PERDURE_PYTHON", "-P", "-m", "perdure", before]
        assert json.loads(each.files["drill.json"])["confined"] is True
        assert "relaunch.sh" not in each.files, "a reboot brings no drill back"
    job = json.loads(plan.files["job.json"])
    assert (job["name"], job["env"]["WANDB_API_KEY"], job["env"]["WANDB_MODE"]) == (
        NAME, "", "disabled",
    )  # fmt: skip
    assert job["env"]["MLFLOW_TRACKING_URI"] == "file:mlruns"
    assert (plan.settings["secrets"], job["launch"].get("budget")) == (("HF_TOKEN",), None)


def test_names_of_starts_are_such_as_may_be_removed() -> None:
    name = name_run(JobSpec(script="x.py", name="a" * 60))
    assert onbox._OWN.fullmatch(name)
    assert onbox._OWN.fullmatch(f"{name}+gpu-b")
    assert not onbox._OWN.fullmatch("gpt")
    assert not onbox._OWN.fullmatch("gpt-drive-0a1b")


def test_all_starts_of_all_drills_of_a_job_have_one_environment() -> None:
    """It stays there: one for each start would be made, and left, again and again."""
    spec = JobSpec(name="gpt", script="train.py", nodes=2, launch=LaunchConfig(project="/p"))
    profile = make_profile(**{"launch.packages": ("einops",)})
    plans = [plan_run(spec, profile, name_run(spec), Kept(confined=True)) for _ in range(2)]
    setups = {each.files["setup.sh"] for plan in plans for each in (plan, *plan.others)}
    assert len(setups) == 1
    assert "/envs/gpt-drill-" in setups.pop()


@pytest.mark.parametrize("answer", ["{", '{"error": 7}', "[]", '{"error": "\ud800'])
def test_an_answer_of_another_shape_is_an_error_in_words(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the removal of all other boxes' folders would end by it."""
    plan = plan_run(
        JobSpec(name="gpt", script="train.py", nodes=2, launch=LaunchConfig(project="/p")),
        make_profile(), NAME, Kept(confined=True),
    )  # fmt: skip
    done = Done(0, f"@@perdure-json {answer}\n", "", "")
    monkeypatch.setattr(Channel, "run", lambda *_, **__: done)
    with pytest.raises(PlatformError, match="another shape"):
        give_order(plan, onbox.Order(what="clean"))


def test_the_box_with_the_controller_stays() -> None:
    for seed in range(20):
        drawn = plan_acts(list(FAULTS), seed, nodes=3, nproc=1)
        acts, left_out = keep_first(*drawn, hosts=("a", "b", "c"), nodes=3)
        assert {act.node for act in acts if act.fault == "node"} <= {1, 2}
        assert left_out == {}
        assert [act for act in acts if act.fault != "node"] == [
            act for act in drawn[0] if act.fault != "node"
        ]
    acts, left_out = keep_first(*plan_acts(list(FAULTS), 0, 2, 1), hosts=("a",), nodes=2)
    assert "node" not in {act.fault for act in acts}
    assert "on a alone" in left_out["node"]
    assert keep_first(*plan_acts(["crash"], 0, 1, 1), hosts=("a",), nodes=1)[1] == {}
    seen = make_snapshot(make_row(0, 0), make_row(1, 2))
    assert aim(Act("node", 0, 1, 0.5), seen, frozenset({0})).node == 2
    assert aim(Act("node", 0, 0, 0.5), seen, frozenset({0})).node == 2


def make_place(folder: Path, name: str = NAME) -> "onbox._Place":
    """Return the folders of a drill's job, with something in each."""
    job, durable = folder / "data" / name, folder / "durable" / name.partition("+")[0]
    (job / "launch").mkdir(parents=True)
    (job / "launch" / "drill.json").write_text('{"confined": false}')
    (job / "launch" / "lease").touch()
    (durable / "state" / "jobs" / name).mkdir(parents=True)
    credentials = folder / f"credentials-{name}"
    credentials.write_text("SECRET=1")
    return onbox._Place(str(job), str(durable), str(durable / "state"), str(credentials))


def test_all_of_a_drill_is_removed_and_nothing_else(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    for folder in ("data", "durable"):
        (tmp_path / folder / "gpt").mkdir()
    (tmp_path / "credentials-gpt").write_text("SECRET=1")
    assert onbox.clean(place) == []
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "credentials-gpt", "data", "data/gpt", "durable", "durable/gpt",
    ]  # fmt: skip
    mine = onbox._Place(
        str(tmp_path / "data" / "gpt"), str(tmp_path / "durable" / "gpt"), str(tmp_path / "no"),
        str(tmp_path / "credentials-gpt"),
    )  # fmt: skip
    (told,) = onbox.clean(mine)
    assert "no folder of a drill" in told
    assert (tmp_path / "data" / "gpt").is_dir()
    assert (tmp_path / "credentials-gpt").exists()


def test_what_is_left_by_drills_whose_watch_has_died_is_removed_by_the_next(tmp_path: Path) -> None:
    mine = make_place(tmp_path)
    new, old = make_place(tmp_path, "gpt-drill-111111"), make_place(tmp_path, "gpt-drill-222222+b")
    for name in ("lease", "drill.json"):
        os.utime(old.launch / name, (time.time() - 7200.0,) * 2)
    os.utime(new.launch / "drill.json", (time.time() - 7200.0,) * 2)
    assert onbox.sweep(mine) == ["gpt-drill-222222+b"]
    assert [place.job.exists() for place in (mine, new, old)] == [True, True, False]
    assert not Path(old.credentials).exists()
    assert Path(mine.credentials).exists()


def test_what_is_watched_or_new_by_its_disks_clock_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The box's clock may be hours before that of a disk which other boxes write on."""
    mine, new = make_place(tmp_path), make_place(tmp_path, "gpt-drill-111111")
    old = make_place(tmp_path, "gpt-drill-222222")
    for name in ("lease", "drill.json"):
        os.utime(old.launch / name, (time.time() - 7200.0,) * 2)
    now_s = time.time()
    monkeypatch.setattr(onbox.time, "time", lambda: now_s + 7200.0)
    lock = onbox._lock_watch(old.launch)
    assert onbox.sweep(mine) == []
    os.close(lock)
    assert onbox.sweep(mine) == ["gpt-drill-222222"]
    assert new.job.exists()


@pytest.fixture
def guarded(tmp_path: Path) -> "onbox._Place":
    """Return a drill's folders as they are sent, before anything was started there."""
    place = make_place(tmp_path)
    (place.launch / "box.py").write_text(read_program("box.py"))
    (place.launch / "env.sh").write_text(
        f'export PERDURE_HOME="{place.home}" DURABLE_DIR="{place.durable}" '
        f'CRED_FILE="{place.credentials}"\n'
    )
    return place


def start_guard(place: "onbox._Place", limit_s: float = 1.5) -> None:
    subprocess.run(
        ["python3", "-I", "-", str(place.job), str(limit_s)], check=True, text=True,
        timeout=PATIENCE_S, input=read_program(GUARD),
    )  # fmt: skip


def test_what_was_sent_is_removed_also_where_no_job_ever_began(
    guarded: "onbox._Place", tmp_path: Path
) -> None:
    for folder in ("data", "durable"):
        (tmp_path / folder / "gpt").mkdir()
    marks = {"PERDURE_HOME": guarded.home, "PERDURE_JOB": NAME}
    with subprocess.Popen(["sleep", "3600"], env=os.environ | marks) as rank:
        try:
            start_guard(guarded)
            wait_until(lambda: not guarded.job.exists(), "its end")
            assert rank.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            rank.kill()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["data", "data/gpt", "durable", "durable/gpt"]


def touch(lease: Path, number: int) -> None:
    """Touch it for the time of this number: each is another, whatever the disk's resolution."""
    lease.touch()
    os.utime(lease, ns=(number * 10**9,) * 2)


def test_a_guard_waits_for_as_long_as_somebody_asks(guarded: "onbox._Place") -> None:
    namespace: dict[str, Any] = {"__name__": "guard"}
    exec(read_program(GUARD), namespace)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks <= 30:
            touch(guarded.launch / "lease", looks)

    namespace["time"] = SimpleNamespace(monotonic=lambda: 1.0 * looks, sleep=sleep)
    assert namespace["wait"](str(guarded.launch), 4.5)
    assert looks == 30 + 5
    shutil.rmtree(guarded.job)
    assert not namespace["wait"](str(guarded.launch), 4.5)


def test_a_guard_removes_nothing_that_is_not_named_as_a_drills(
    guarded: "onbox._Place", tmp_path: Path
) -> None:
    """Whatever the folder's own `env.sh` says."""
    (tmp_path / "precious").mkdir()
    (guarded.launch / "env.sh").write_text(
        f'export PERDURE_HOME="{tmp_path}" DURABLE_DIR="{tmp_path}/precious" '
        f'CRED_FILE="{tmp_path}/precious"\n'
    )
    start_guard(guarded, 0.0)
    wait_until(lambda: not guarded.job.exists(), "its end")
    assert (tmp_path / "precious").is_dir()
    assert guarded.durable.is_dir()
    mine = tmp_path / "data" / "gpt"
    (mine / "launch").mkdir(parents=True)
    namespace: dict[str, Any] = {"__name__": "guard"}
    exec(read_program(GUARD), namespace)
    namespace["remove"](str(mine))
    assert mine.is_dir()


def test_a_disk_that_does_not_answer_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onbox, "LEASE_S", 0.5)
    monkeypatch.setattr(onbox, "_LOOK_S", 0.05)
    place, stat = make_place(tmp_path), os.stat

    def fail(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("/lease"):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, *args, **options)

    watcher = os.fork()
    if watcher == 0:
        try:
            onbox.os.stat = fail
            onbox.watch(place)
        finally:
            os._exit(0)
    os.waitpid(watcher, 0)
    assert not place.job.exists()


def test_a_script_that_deletes_its_own_folder_is_ended_as_well(
    guarded: "onbox._Place", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells of its supervisor is gone with it."""
    monkeypatch.setattr(onbox, "_LOOK_S", 0.05)
    box, launch = guarded.launch / "box.py", str(guarded.launch)
    up = tmp_path / "up"
    box.write_text(f"import time\nopen({str(up)!r}, 'w')\ntime.sleep(3600)\n")
    marks = {"PERDURE_HOME": guarded.home, "PERDURE_JOB": NAME}
    with (
        subprocess.Popen([sys.executable, str(box), "supervise", launch]) as supervisor,
        subprocess.Popen(["sleep", "3600"], env=os.environ | marks) as rank,
    ):
        watcher = os.fork()
        if watcher == 0:
            try:
                onbox.watch(guarded)
            finally:
                os._exit(0)
        try:
            wait_until(lambda: onbox.is_watched(guarded.launch), "watch")
            wait_until(up.exists, "supervisor")
            assert (supervisor.poll(), rank.poll()) == (None, None)
            shutil.rmtree(guarded.job)
            assert (supervisor.wait(PATIENCE_S), rank.wait(PATIENCE_S)) == (-signal.SIGKILL,) * 2
            os.waitpid(watcher, 0)
            assert not Path(guarded.credentials).exists()
        finally:
            supervisor.kill()
            rank.kill()


def test_a_job_that_nobody_asks_after_is_ended_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onbox, "LEASE_S", 0.5)
    monkeypatch.setattr(onbox, "_LOOK_S", 0.05)
    place = make_place(tmp_path)
    marks = {"PERDURE_HOME": place.home, "PERDURE_JOB": NAME}
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    (said, say), (heard, hear) = os.pipe(), os.pipe()
    now_s = 1000.0

    def pause(seconds: float) -> None:
        """Let time pass for the watch, once it may look again."""
        nonlocal now_s
        now_s += seconds
        os.write(say, b"x")
        os.read(heard, 1)

    with subprocess.Popen(sleep, env=os.environ | marks) as rank:
        try:
            watcher = os.fork()
            if watcher == 0:
                try:
                    os.close(said)
                    os.close(hear)
                    onbox.time = SimpleNamespace(monotonic=lambda: now_s, sleep=pause)
                    onbox.watch(place)
                finally:
                    os._exit(0)
            os.close(say)
            os.close(heard)
            for number in range(1, 31):  # For three times as long as a lease lasts.
                assert os.read(said, 1) == b"x"
                touch(place.launch / "lease", number)
                assert rank.poll() is None, "it is asked after"
                os.write(hear, b"x")
            while os.read(said, 1):
                os.write(hear, b"x")
            wait_until(lambda: rank.poll() is not None, "end of the job")
            os.waitpid(watcher, 0)
            assert not place.job.exists()
        finally:
            rank.kill()
            os.close(said)
            os.close(hear)


def test_the_program_that_asks_a_kernel_for_landlock_runs_by_itself() -> None:
    from perdure.adapters.confinement import read_abi
    from perdure_lab.drill.boxes import render_probe

    done = subprocess.run(["python3", "-I", "-"], input=render_probe(), capture_output=True,
                          text=True, timeout=PATIENCE_S)  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"@@perdure-json {read_abi()}"


def test_an_order_and_a_strike_travel_as_json() -> None:
    order = onbox.Order(what="strike", act=Act("crash", 1, 0, 0.5), lead=7)
    assert msgspec.json.decode(msgspec.json.encode(order), type=onbox.Order) == order


def test_where_nothing_was_started_only_what_is_named_as_a_drills_is_removed(
    tmp_path: Path,
) -> None:
    own, precious = tmp_path / NAME, tmp_path / "precious"
    for folder in (own, precious):
        folder.mkdir()
    env = {"JOB_DIR": str(own), "DURABLE_DIR": str(precious), "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-c", REMOVE], env=env, check=True, timeout=PATIENCE_S)
    assert os.listdir(tmp_path) == ["precious"]
