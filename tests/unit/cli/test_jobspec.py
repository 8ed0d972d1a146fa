"""A job file and options become one job."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.running import jobspec
from perdure.cli.running.jobspec import check_job, make_spec
from perdure.cli.running.options import RunOptions
from perdure.cli.running.run import choose_shown_ranks
from perdure.model.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        'name="a"\nscript="x.py"\nargs=["--steps","9"]\nnproc=4\n[restart]\ngrace_s=5\n[env]\nA="1"\n',
    )
    spec, named, notes = make_spec(
        RunOptions(config=config, nproc="2", max_restarts=0, env=["B=2", "A=x=y"])
    )
    assert (spec.name, named, notes) == ("a", True, [])
    assert (spec.nproc, spec.args) == (2, ("--steps", "9"))
    assert (spec.restart.max_restarts, spec.restart.grace_s) == (0, 5)
    assert spec.env == {"A": "x=y", "B": "2"}


def test_a_script_on_the_command_line_takes_no_arguments_from_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, 'script="x.py"\nargs=["--steps","9"]\n')
    spec, named, _ = make_spec(RunOptions(config=config, script="y.py", args=["-v"]))
    assert (spec.script, spec.args, named) == ("y.py", ("-v",), False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": ""}, "no script to run"),
        ({"name": ""}, "name: not a name of a job"),
    ],
)
def test_an_empty_option_is_given_all_the_same(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    """`perdure run -c job.toml "$SCRIPT"` without that variable ran the file's own script."""
    config = write(tmp_path, 'name="a"\nscript="x.py"\nlog_dir="logs"\n')
    with pytest.raises(ConfigError, match=message):
        make_spec(RunOptions(config=config, **options))
    spec, _, _ = make_spec(RunOptions(config=config, log_dir=""))
    assert spec.log_dir == ""


def test_a_role_and_an_id_of_the_run_are_variables_of_every_rank() -> None:
    """The role was a field of the job that nothing read: ROLE_NAME was always `default`."""
    options = RunOptions(script="x.py", role="trainer", rdzv_id="r", env=["A=1"])
    spec, _, _ = make_spec(options)
    assert spec.env == {"A": "1", "ROLE_NAME": "trainer", "TORCHELASTIC_RUN_ID": "r"}
    spec, _, _ = make_spec(RunOptions(script="x.py", rdzv_id="none"))
    assert spec.env == {}


def test_an_empty_server_is_none(tmp_path: Path) -> None:
    config = write(tmp_path, 'script="x.py"\n[nats]\nurl="nats://a:1"\n')
    spec, _, _ = make_spec(RunOptions(config=config, nats=""))
    assert spec.nats.url == "nats://a:1"


FLAGS: tuple[dict[str, Any], ...] = (
    {"torchft": True}, {"replicas": 3}, {"env": ["A=1"]}, {"nproc": "2"}, {"max_restarts": 1},
    {"nats": "nats://a:1"}, {"script": "y.py", "args": []},
)  # fmt: skip
SECTIONS = ("torchft", "env", "nproc", "restart", "nats", "bus", "args", "checkpoint")
VALUES = (
    None,
    True,
    -1,
    3,
    2**63,
    1.5,
    math.inf,
    "",
    "x\0",
    "\ud800",
    [],
    [1],
    [[]],
    {"a": {"b": []}},
)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_file_says_is_wrong_in_one_way_whatever_the_options(
    tmp_path: Path, section: str
) -> None:
    """`torchft = 3` and --replicas were a TypeError."""
    path = tmp_path / "job.json"
    for value in VALUES:
        path.write_text(json.dumps({"script": "x.py", section: value}))
        for flags in ({}, *FLAGS):
            with contextlib.suppress(ConfigError):
                make_spec(RunOptions(config=str(path), **flags))
    path.write_text(json.dumps({"script": "x.py", "torchft": 3}))
    for flags in ({}, *FLAGS):
        with pytest.raises(ConfigError, match=r"job.json: torchft: Expected `object`, got `int`"):
            make_spec(RunOptions(config=str(path), **flags))


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("nproc=1000000000\n", 2, "nproc"),
        ("nodes=1000000000\n", 2, "nodes"),
        ("nproc=256\nnodes=257\n", 3, "nodes"),
        ("spares=1000000000\n", 2, "spares"),
        ("nodes_max=1000000000\n", 2, "nodes_max"),
        ("remote=1000000000\n", 2, "remote"),
        ("[torchft]\nreplicas=1000000000\n", 3, "torchft.replicas"),
    ],
)
def test_more_ranks_than_have_numbers_are_refused_in_a_line(
    tmp_path: Path, text: str, line: int, field: str
) -> None:
    """It took 5.4 GB, and ended with the traceback of a MemoryError."""
    config = write(tmp_path, f'script="x.py"\n{text}')
    with pytest.raises(ConfigError, match=rf"job.toml, line {line}: {field} = .* 65536") as told:
        make_spec(RunOptions(config=config))
    assert told.value.exit_code == 2


@pytest.mark.parametrize(
    "options", [{"nproc": "1000000000"}, {"nodes": 1000000000}, {"nproc": "256", "nodes": 257}]
)
def test_options_for_too_many_ranks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"options: n.* are more than 65536"):
        make_spec(RunOptions(script="x.py", **options))
    assert make_spec(RunOptions(script="x.py", nproc="256", nodes=256))[0].nproc == 256


def test_a_number_of_ranks_with_very_many_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a number of ranks"):
        make_spec(RunOptions(script="x.py", nproc="9" * 5000))


def test_an_option_that_is_wrong_is_not_the_files_fault(tmp_path: Path) -> None:
    config = write(tmp_path, 'name="a"\nscript="x.py"\n')
    with pytest.raises(ConfigError, match=r"^options: name: not a name of a job$"):
        make_spec(RunOptions(config=config, name="a/b"))


def test_the_mark_that_some_editors_write_in_front_is_passed_over(tmp_path: Path) -> None:
    config = write(tmp_path, '\ufeffscript="x.py"\nnproc=3\n')
    assert make_spec(RunOptions(config=config))[0].nproc == 3
    (tmp_path / "job.json").write_text('\ufeff{"script": "x.py", "nproc": 3}')
    assert make_spec(RunOptions(config=str(tmp_path / "job.json")))[0].nproc == 3


@pytest.mark.parametrize("name", ["A=", ""])
def test_a_variable_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    """Each of its four starts failed with exit code 1, and nothing else."""
    config = write(tmp_path, f'script="x.py"\n[env]\n"{name}"="x"\n')
    (tmp_path / "x.py").write_text("")
    spec, _, _ = make_spec(RunOptions(config=config, script=str(tmp_path / "x.py")))
    with pytest.raises(ConfigError, match=f"env: `{name}` is no name of a variable"):
        check_job(spec, str(tmp_path / "home"), {})


def test_relative_places_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path, 'script="x.py"\n[checkpoint]\nurl="ck"\n')
    spec, _, _ = make_spec(RunOptions(config=config, log_dir="logs"))
    assert spec.cwd == str(tmp_path)
    assert spec.checkpoint.url == str(tmp_path / "ck")
    assert spec.log_dir == str(tmp_path / "logs")
    config = write(tmp_path, 'script="x.py"\n[checkpoint]\nurl="s3://b/ck"\n')
    assert make_spec(RunOptions(config=config))[0].checkpoint.url == "s3://b/ck"


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ('mlflow="http://ann:pw@host/x"', "tracking.mlflow has a login in it"),
        ('wandb="https://wandb.own/team/p"', "not PROJECT or ENTITY/PROJECT"),
        ('tensorboard="s3://bucket/runs"', "not a folder"),
    ],
)
def test_a_tracker_has_no_login_in_a_job_file(tracking: str, message: str, tmp_path: Path) -> None:
    config = write(tmp_path, f'script="x.py"\n[tracking]\n{tracking}\n')
    with pytest.raises(ConfigError, match=message) as caught:
        make_spec(RunOptions(config=config))
    assert "pw" not in caught.value.message
    fine = 'mlflow="http://host/x"\nwandb="team/p"\ntensorboard="runs"'
    config = write(tmp_path, f'script="x.py"\n[tracking]\n{fine}\n')
    spec, _, _ = make_spec(RunOptions(config=config))
    assert spec.tracking.tensorboard == os.path.join(spec.cwd, "runs")
    assert list(spec.tracking.targets) == ["tensorboard", "wandb", "mlflow"]


@pytest.mark.parametrize(("url", "extra"), [("s3://b/run", "s3"), ("gs://b/run", "gcs")])
def test_a_bucket_whose_library_is_missing_is_refused_before_the_job_begins(
    url: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobspec, "find_spec", lambda module: None)
    config = write(tmp_path, f'script="x.py"\n[checkpoint]\nurl="{url}"\n')
    spec, _, _ = make_spec(RunOptions(config=config))
    with pytest.raises(ConfigError, match="needs") as caught:
        check_job(spec, str(tmp_path / "home"), {})
    assert f"perdure[{extra}]" in caught.value.hint


def test_a_tracker_whose_library_is_missing_is_said_before_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.py").write_text("")
    monkeypatch.setattr(jobspec, "read_installed", lambda package: "")
    config = write(tmp_path, 'script="x.py"\n[tracking]\nmlflow="http://host"\n')
    monkeypatch.chdir(tmp_path)
    spec, _, _ = make_spec(RunOptions(config=config))
    notes = check_job(spec, str(tmp_path / "home"), {})
    assert any("pip install 'perdure[mlflow]'" in note for note in notes), notes


def test_a_rendered_plan_reads_back(tmp_path: Path) -> None:
    spec, _, _ = make_spec(RunOptions(script="x.py", nproc="2", name="n", rdzv_id="r"))
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(spec))
    assert make_spec(RunOptions(config=str(path)))[0] == spec


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('script="x"\nnprocs=2', "unknown field `nprocs`", "did you mean `nproc`?"),
        ('script="x"\n[detect]\nhang_floor=1', "detect: Object contains", "`hang_floor_s`"),
        ('script="x"\nnproc=0', "nproc: Expected `int` >= 1", "documented"),
        ('script="x"\n[checkpoint]\nkeep_last="a"', "checkpoint.keep_last: Expected `int`", ""),
        ('script="x"\nname="a/b"', ", line 2: name: not a name of a job", "letters"),
        ('script="x\n', "not TOML", "toml.io"),
        (f"script={'[' * 2000}", "not TOML: maximum recursion", "toml.io"),
        (f'script="x"\nnproc={"9" * 5000}', "not TOML: Exceeds the limit", "toml.io"),
        ('script="x"\nnproc' + ".a" * 1100 + "=1", "too deep", "documented"),
        ('script="x"\nargs=["a\\u0000"]', "line 2: args.0: a text with a NUL in it", "NUL"),
        ('script="x"\n[env]\n"A\\u0000"="1"', "env.A\x00: a text with a NUL in it", "NUL"),
        ("nproc=2", "no script", "SCRIPT"),
        (
            'script="x"\n[tracking]\nevery_s=inf',
            "line 3: tracking.every_s: inf is not finite",
            "number",
        ),
        (
            'script="x"\n[tracking]\nevery_s=nan',
            "line 3: tracking.every_s: nan is not finite",
            "number",
        ),
        ('script="x"\n[tracking]\nevery_s=-1.0', "tracking.every_s: Expected `float` > 0", ""),
        ('script="x"\n[restart]\nwindow_s=inf', "restart.window_s: inf is not finite", ""),
        ('script="x"\n[restart]\nwindow_s=1e300', "restart.window_s: 1e+300 is too large", "1e+09"),
        (f'script="x"\nnproc={10**30}', f"line 2: nproc: {10**30} is too large", "9e+15"),
        ('script="x"\n[preemption.signals]\nSIGTERM=nan', "preemption.signals.SIGTERM: nan", ""),
        (
            'script="x"\n[torchft]\nreplicas=2\nlighthouse="stock"\n[checkpoint]\nevery_s=5',
            "checkpoint.every_s",
            'torchft.lighthouse = "perdure"',
        ),
        (
            'script="x"\nspares=1\n[torchft]\nreplicas=2\nlighthouse="http://there:1"',
            "--spares",
            "one replica more",
        ),
    ],
)
def test_a_wrong_field_is_named_by_its_path(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(RunOptions(config=write(tmp_path, text)))
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"config": "/nowhere/job.toml"},
        {"script": "x", "module": True, "no_python": True},
        {"script": "x", "env": ["A"]},
        {"script": "x", "nnodes": "2"},
    ],
)
def test_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_spec(RunOptions(**options))


def test_what_is_ignored_is_said() -> None:
    notes = make_spec(
        RunOptions(script="x", rdzv_backend="c10d", monitor_interval=1.0, start_method="fork")
    )[2]
    assert [note.split()[0] for note in notes] == [
        "--rdzv-backend",
        "--monitor-interval",
        "--start-method",
    ]


def test_which_ranks_are_shown() -> None:
    def shown(**options: Any) -> set[int]:
        given = RunOptions(script="x", nproc="2", nodes=2, **options)
        return set(choose_shown_ranks(make_spec(given)[0], given))

    assert shown() == {0, 1, 2, 3}
    assert shown(redirects="3") == set()
    assert shown(redirects="3", tee="0:3") == {0, 2}
    assert shown(redirects="1:3") == {0, 2}
    assert shown(local_ranks_filter="1") == {1, 3}
