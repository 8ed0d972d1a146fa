"""`perdure plan`: what is asked for is understood, or refused in a line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.profiles import MB, make_profile

from perdure.cli.app import run_command
from perdure.model.planning.costs import write_profile
from perdure_lab.cli.plan import parse_size

WORDS = ["--devices", "2", "--global-batch", "8"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "p.json"
    path.write_text(write_profile(make_profile([0.01, 0.02], state=100 * MB, stored=10 * MB)))
    return str(path)


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("1.5 MiB", 3 << 19), ("100", 100), ("2k", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_json_is_one_document(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", profile, *WORDS, "--memory", "1GB", "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(plan) == {"profile", "options", "excluded", "notes", "simulated", "slower"}
    best = plan["options"][0]
    assert best["samples_per_s"] == pytest.approx(8 / best["step_s"])
    assert best["world"]["count"] * best["world"]["micro_batch"] == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "1MB"], "no world fits 2 devices of 1MB"),
        (["--memory", "much"], "much is not a size"),
        (["--memory", "1GB", "--slow", "n5/0=2"], "there is no device n5/0"),
        (["--memory", "1GB", "--slow", "n1/0"], "expected DEVICE=FACTOR"),
        (["--memory", "1GB", "--slow", "n1/0=0.5"], "expected a factor from 1 on"),
        (["--memory", "1GB", "--recompute", "seldom"], "invalid enum value 'seldom'"),
        (["--memory", "1GB", "--micro-batch", "3"], "micro-batches of 3 were not measured"),
    ],
)
def test_what_cannot_be_is_one_line(
    profile: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", profile, *WORDS, *words]) == 2
    first, hint = capsys.readouterr().err.strip().splitlines()
    assert said in first
    assert hint.startswith("hint: ")


def test_a_profile_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", str(tmp_path / "none.json"), *WORDS, "--memory", "1GB"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_machine_measured_alone_has_all_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_profile([0.01, 0.02])
    alone = msgspec.structs.replace(whole, transfers=whole.transfers[:1], all_reduces=())
    path = tmp_path / "p.json"
    path.write_text(write_profile(alone))
    words = [*WORDS, "--memory", "1GB", "--ranks", "2", "--json"]
    assert run_command(["plan", str(path), *words]) == 0
    world = json.loads(capsys.readouterr().out)["options"][0]["world"]
    assert len(world["stages"]) == 2  # Its transfers are of one node.
