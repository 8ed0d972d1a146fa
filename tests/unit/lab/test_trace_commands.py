"""`perdure trace`: what a person types, and what comes back."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.app import run_command
from perdure.model.report import ACCOUNTS
from perdure_lab.policies.policies import POLICIES

TAU = {
    "models": {
        "one": {"global_batch": 8, "parameters": 1e6, "configs": [
            {"D": 1, "P": 1, "samples_per_s": 1.0}, {"D": 2, "P": 1, "samples_per_s": 1.9}]},
        "two": {"global_batch": 8, "configs": [{"D": 1, "P": 2, "samples_per_s": 3.0}]},
    }
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("0,add,a\n0,add,b\n60000,remove,b\n120000,add,c\n600000,remove,a\n")
    return path


@pytest.fixture
def perdure(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: object, code: int = 0) -> str:
        assert run_command([str(arg) for arg in args]) == code
        return capsys.readouterr().out

    return call


def test_simulate_json_has_the_promised_shape(perdure: Any, trace: Path) -> None:
    answer = json.loads(perdure("trace", "simulate", trace, "--sweep-communicator", "--json"))
    assert {"trace", "u1", "u2", "u2_online", "policies"} <= answer.keys()
    assert [row["policy"] for row in answer["policies"]] == list(POLICIES)
    for row in answer["policies"]:
        assert {"committed", "fraction_of_u2", "ledger", "source"} <= row.keys()
        assert tuple(row["ledger"]) == ACCOUNTS
        assert sum(row["ledger"].values()) == pytest.approx(1.0)
    sweep = answer["sweep"]
    assert [row["communicator_s"] for row in sweep] == [0.1, 0.2, 0.5, 1, 2, 5, 10]
    assert all(row["fraction_of_u2"] <= row["u2_online_of_u2"] for row in sweep)


def test_settings_change_a_policy_and_are_told_as_its_source(perdure: Any, trace: Path) -> None:
    def run(*args: object) -> dict[str, Any]:
        text = perdure("trace", "simulate", trace, "--policy", "oobleck", "--json", *args)
        (row,) = json.loads(text)["policies"]
        return dict(row)

    slow = run("--set", "oobleck.loss.communicator_s=20")
    assert slow["committed"] == pytest.approx(run()["committed"] - 2 * 15)  # two losses, one node
    assert slow["source"].endswith("oobleck.loss.communicator_s=20")


def test_a_table_is_read_from_a_file(perdure: Any, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "tau.json"
    path.write_text(json.dumps(TAU))
    answer = json.loads(perdure("trace", "simulate", trace, "--tau", f"{path}:one", "--json"))
    # Two nodes but for a minute and for the last minute, which lasts as long as entries do.
    assert answer["u1"] == pytest.approx(60 * 1.9 + 60 * 1.0 + 480 * 1.9 + 60 * 1.0)
    assert answer["throughput"].startswith("one")
    for name, hint in ((str(path), "several"), (f"{path}:three", "no model `three`")):
        error = json.loads(perdure("trace", "simulate", trace, "--tau", name, "--json", code=2))
        assert hint in error["error"]
    error = json.loads(
        perdure("trace", "simulate", trace, "--tau", f"{path}:two", "--json", code=2)
    )
    assert error["hint"] == "--state-gb SIZE"  # what is missing is an error and never a zero


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "none"], "no policy `none`"),
        (["--set", "perdure"], "cannot set `perdure`"),
        (["--set", "perdure.speed=1"], "perdure has no `speed`"),
        (["--set", "perdure.save_s=fast"], "Expected `float`"),
        (["--tau", "nowhere"], "cannot read a table"),
    ],
)
def test_what_cannot_be_is_one_line(perdure: Any, trace: Path, args: list[str], words: str) -> None:
    error = json.loads(perdure("trace", "simulate", trace, *args, "--json", code=2))
    assert words in error["error"]
    assert error["hint"]


def test_convert_and_back(perdure: Any, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    answer = json.loads(
        perdure("trace", "convert", trace, "--to", "perdure", "-o", out, "--notice", 5, "--json")
    )
    assert answer == {"file": str(out), "format": "perdure", "loses": ""}
    assert perdure("trace", "convert", out, "--to", "events") == trace.read_text()
    shown = json.loads(perdure("trace", "show", out, "--json"))
    assert (shown["nodes"], shown["departures"], shown["notice_s"]) == (3, 2, 5.0)
    assert [row["nodes"] for row in shown["counts"]] == [2, 1, 2, 1]


def test_plots_are_files_that_stand_alone(perdure: Any, trace: Path, tmp_path: Path) -> None:
    for command in ("show", "simulate"):
        svg, html = tmp_path / f"{command}.svg", tmp_path / f"{command}.html"
        perdure("trace", command, trace, "--svg", svg, "--html", html)
        assert svg.read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        page = html.read_text()
        assert "<svg" in page
        assert "src=" not in page


def test_a_malformed_trace_is_two_lines_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0,add,a\n5,remove,b\n")
    assert run_command(["trace", "show", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"perdure: error: {path}:2:10: expected a node that is there, got b\n")
    assert err.splitlines()[1].startswith("hint: ")


def test_generated_traces_are_read_back(perdure: Any, tmp_path: Path) -> None:
    out = tmp_path / "g.json"
    args = ("--nodes", 8, "--mtbf", 600, "--absence", 300, "--notice", 30, "--hours", 1)
    answer = json.loads(perdure("trace", "generate", *args, "--out", out, "--json"))
    assert answer["model"]["losses_per_node_h"] == 6.0
    shown = json.loads(perdure("trace", "show", out, "--json"))
    assert shown["nodes_max"] <= 8
    assert shown["announced"] == 1.0
