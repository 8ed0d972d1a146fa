"""Errors in two lines, or as JSON, with the exit code of whose fault it was."""

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.app import load_command, name_param, read_rule, run_command
from perdure.cli.commands import COMMANDS
from perdure.cli.main import main
from perdure.cli.speech.say import render_table
from perdure.service.jobfolders import paths_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("")
    (tmp_path / "good.toml").write_text('script = "x"\n')
    (tmp_path / "bad.toml").write_text('script = "x"\n[checkpoint]\nevery_step = 3\n')
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "inf.toml").write_text('[[item]]\ncommand = ["x"]\nbackoff_s = inf\n')
    (tmp_path / "dear.toml").write_text('base = "generic-ssh"\n[teardown]\nprice_per_hour = inf\n')
    return tmp_path


@pytest.mark.parametrize("args", [[], ["queue"], ["trace"]])
def test_without_a_command_there_is_help(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert run_command(args) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("Usage: perdure")) == ("", True)


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["nosuch"], "No such command 'nosuch'.", "perdure --help"),
        (["run", "--foo", "x.py"], "No such option: --foo", "perdure run --help"),
        (["run"], "no script to run", "SCRIPT"),
        (
            ["run", "-c", "bad.toml"],
            "bad.toml, line 3: checkpoint: Object contains unknown field `every_step`",
            "did you mean `every_steps`?",
        ),
        (["launch", "bad.json", "--on", "local"], "bad.json: not JSON", "one object"),
        (["run", "--name", "a/b", "x"], "options: name: not a name of a job", "letters"),
        (["queue", "add", "nosuch.toml"], "cannot read nosuch.toml: No such file", "path"),
        (["launch", "good.toml", "--on", "nosuch"], "no profile `nosuch`", "there is autodl"),
        (["profiles", ""], "no profile ``", "there is autodl"),
        (["verify", "good.toml"], "no checkpoints in good.toml", "step-*"),
        (["run", "--numa_binding", "node", "x"], "--numa-binding of torchrun", "numactl"),
        (["run", "nosuch.py", "--json"], "no such script: nosuch.py", "looked in"),
        (["run", "--max_restarts", "-1", "x"], "Invalid value", "--help"),
        (["run", "--max-restarts", "9" * 30, "x"], "too large", "--help"),
        (["run", "-n", "9" * 30, "x"], "too large", "9e+15"),
        (["watch", "nosuch", "--every", "inf"], "'--every': inf is not finite", "watch --help"),
        (["watch", "nosuch", "--every", "nan"], "Invalid value for '--every'", "watch --help"),
        (["node", "join", "x", "--wait", "nan"], "Invalid value for '--wait'", "join --help"),
        (
            ["node", "join", "x", "--grace", "1e300"],
            "'--grace': 1e+300 is too large",
            "join --help",
        ),
        (["pull", "nosuch", "d", "--up-to", "inf"], "'--up-to': inf is not finite", "pull --help"),
        (["stop", "nosuch", "--timeout-s", "inf"], "inf is not finite", "stop --help"),
        (
            ["trace", "convert", "x", "--to", "y", "--gap", "inf"],
            "inf is not finite",
            "trace convert --h",
        ),
        (["node", "invite", "nosuch", "--uses", "9" * 30], "too large", "invite --help"),
        (["inject", "x", "slow", "--rank", "0", "--arg", "ms=1.5e999"], "ms: inf is not", "NAME"),
        (["queue", "add", "inf.toml"], "inf.toml: item.0.backoff_s: inf is not finite", "number"),
        (["launch", "good.toml", "--on", "./dear.toml"], "dear.toml, line 3: inf is not", "number"),
        (["status", "nosuch"], "unknown job `nosuch`", "there are no jobs under"),
        (["stop", "nosuch"], "unknown job", ""),
        (["inject", "nosuch", "bite", "--rank", "0"], "unknown fault `bite`", "crash, exit"),
    ],
)
def test_an_error_is_two_lines(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str, hint: str
) -> None:
    assert run_command(args) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("perdure: error: ")
    assert message in first
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize("args", [["status", "no", "--json"], ["run", "--json", "-n", "2", "no"]])
def test_an_error_as_json(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run_command(args) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out).keys() == {"error", "hint", "exit_code"}


def test_the_scripts_own_arguments_are_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "-n", "2", "no.py", "--json", "--foo"]) == 2
    assert capsys.readouterr().err.startswith("perdure: error: no such script: no.py")


@pytest.mark.parametrize("args", [["agent"], ["agent", "job", "x"], ["keeper", "j", "0", "1"]])
def test_parts_want_their_arguments(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(args)
    assert left.value.code == 2
    assert "usage: perdure" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("perdure 0.")


def test_table() -> None:
    table = render_table(("name", "n"), [("a", 1), ("bcdef", 22)])
    assert table == "name    n\na       1\nbcdef  22"


def test_a_home_whose_name_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", "/tmp/a\udcff")
    assert run_command(["status"]) == 2
    assert "'/tmp/a\\udcff' is not UTF-8" in capsys.readouterr().err


def test_a_command_that_lacks_its_job_names_those_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    for name in ("demo", "old"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "job.json").write_text("{}")
    assert run_command(["stop"]) == 2
    assert "hint: perdure stop --help" in capsys.readouterr().err
    with open(paths_of(str(tmp_path), "demo").lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_command(["stop"]) == 2
    assert "hint: perdure stop JOB; running here: demo\n" in capsys.readouterr().err


def test_a_drill_of_a_script_says_where_its_job_file_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["drill", "train.py", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "train.py is a script, and a drill is of a job file" in err
    assert "hint: perdure init train.py" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status j --watch", "--watch goes with --devices"),
        ("status --host box", "--host goes with --port"),
        ("status j --running", "--running goes without JOB"),
        ("status j --remind", "--remind goes without JOB"),
        ("status --running --remind", "--remind goes without --running"),
        ("status --all --running", "--all goes without --running"),
        ("status --links --devices", "--devices goes alone"),
        ("status --links --running", "--links goes alone"),
        ("status --port 80 --remind", "--port goes alone"),
        ("status --devices --width 80", "--devices goes alone"),
        ("watch --once --every 2", "--every goes without --once"),
        ("logs j --part agent-0 --rank 0", "--rank goes without --part"),
        ("logs j --all --generation 1", "--all goes without --generation"),
        ("events j --decisions --all", "--decisions goes without --all"),
        ("events j --decisions --kind RankExited", "--decisions goes without --kind"),
        ("metrics j --host 0.0.0.0", "--host goes with --port"),
        ("metrics j --no-run-log", "--run-log goes with --tensorboard or --wandb or --mlflow"),
        ("metrics j --follow --port 0", "--follow goes with --tensorboard or --wandb or --mlflow"),
        ("metrics j --port 0 --wandb p", "--port goes without --wandb"),
        ("metrics j --curves --port 0", "--curves goes alone"),
        ("report j k --html page.html", "--html goes without OTHER"),
        ("set j --at-step 3", "--at-step goes with KEY=VALUE or --undo"),
        ("set j --why tired", "--why goes with KEY=VALUE or --undo"),
        ("set j --undo lr=1", "--undo goes without KEY=VALUE"),
        ("set j lr=1 --all", "--all goes without KEY=VALUE"),
        ("node notify j device-ok --grace 3", "--grace goes with preemption"),
        ("node invite j --end-login", "--end-login goes with --revoke"),
        ("node invite j --list --uses 2", "--list goes alone"),
        ("node invite j --revoke x --out f", "--revoke goes alone"),
        ("profiles --measure", "--measure goes with NAME"),
        ("profiles --host box", "--host goes with NAME"),
        ("teardown j --yes", "--yes goes with --forget"),
        ("teardown j --forget --with-volume", "--forget goes without --with-volume"),
        ("teardown j --forget --by-hand", "--forget goes without --by-hand"),
        ("teardown j --by-hand --with-volume", "--with-volume goes without --by-hand"),
        ("doctor --host box", "--host goes with --on"),
        ("doctor --probe", "--probe goes with JOB"),
        ("doctor j --project .", "--project goes without JOB"),
        ("doctor --schema --all", "--schema goes alone"),
        ("doctor train.py --on box", "--probe, --on and --all are not for a script"),
        ("launch --torch 2.13.0 job.toml", "--torch goes with --write-image"),
        ("launch --no-compile job.toml", "--compile goes with --write-image"),
        ("launch --write-image - job.toml", "JOB.TOML goes without --write-image"),
        ("launch --write-image - --on box", "--write-image goes alone"),
        ("launch --out d job.toml", "--out goes with --dry-run"),
        ("launch --dry-run --attach job.toml", "--attach goes without --dry-run"),
        ("launch --host box job.toml", "--host goes with --on"),
        ("init train.py --budget 30", "--budget goes with --try"),
        ("drill job.toml --dry-run --html f", "--html goes without --dry-run"),
        ("trace drive t.json j --dry-run --svg f", "--svg goes without --dry-run"),
        ("trace convert t.json --to events --gap 3", "--gap goes with skypilot or polls"),
        ("profile --node-rank 1 train.py", "--node-rank goes with --nnodes"),
        (
            "plan p --devices 1 --global-batch 1 --memory 1GB --width 80",
            "--width goes with --timeline",
        ),
        ("drill job.toml --unconfined --writable d", "--writable goes without --unconfined"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line.split()) == 2
    assert f"perdure: error: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "status j --links --width 80 --json",
        "status j --devices --watch",
        "status --port 80 --port 81 --host box",
        "status -r --clean",
        "metrics j --port 0 --ranks-max 3 --host ::1",
        "set j --undo --at-step 3 --why tired",
        "node notify j preemption --node 1 --grace 3 --waits",
        "node invite j --revoke x --end-login --json",
        "launch --write-image - --torch none --no-compile",
        "teardown j --forget --yes --box-is-gone --dry-run",
        "trace convert t.json --to polls --gap 3",
        "run --detach --tee 3 --redirects 3 --local-ranks-filter 0 train.py",
    ],
)
def test_options_that_go_together_are_taken(line: str) -> None:
    _, *words = line.split()
    command = load_command(line.split()[0])
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    ran = []
    command.callback = lambda **given: ran.append(given)
    command.main(words, standalone_mode=False)
    assert len(ran) == 1


def list_leaves(command: Any) -> list[Any]:
    inner = getattr(command, "commands", {}).values()
    return [leaf for one in inner for leaf in list_leaves(one)] or [command]


def test_every_rule_of_a_help_names_what_its_command_has() -> None:
    for name in COMMANDS:
        for command in list_leaves(load_command(name)):
            names = {name for param in command.params for name in name_param(param)}
            for param in command.params:
                text = getattr(param, "help", None) or ""
                _, others = read_rule(param)
                assert others or not re.match(r"(With|Without|Alone)\b[^.]*: ", text), text
                values = " ".join(str(getattr(p, "help", "")) for p in command.params)
                for other in filter(None, others):
                    assert other in names or other in re.findall(r"[a-z-]+", values), text
