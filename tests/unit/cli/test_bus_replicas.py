"""Replicas of the bus are refused where they would guard against nothing."""

from pathlib import Path

import pytest

from perdure.cli.running.jobspec import make_spec
from perdure.cli.running.options import RunOptions
from perdure.model.errors import ConfigError


def test_three_replicas_on_three_nodes(tmp_path: Path) -> None:
    spec, _, _ = make_spec(RunOptions(script=str(tmp_path / "s.py"), nodes=3, replicate=3))
    assert spec.bus.replicas == 3
    assert spec.contested


def test_two_replicas_want_an_arbiter(tmp_path: Path) -> None:
    given = RunOptions(script=str(tmp_path / "s.py"), nodes=2, replicate=2, arbiter=str(tmp_path))
    spec, _, _ = make_spec(given)
    assert spec.bus.arbiter == str(tmp_path)
    assert spec.contested


def test_an_arbiter_and_a_server_of_ones_own_exclude_one_another(tmp_path: Path) -> None:
    given = RunOptions(
        script="s.py", nodes=2, replicate=2, arbiter=str(tmp_path), nats="nats://127.0.0.1:4222"
    )
    with pytest.raises(ConfigError, match="instead of --nats"):
        make_spec(given)


def test_an_arbiter_of_one_decides_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one controller") as caught:
        make_spec(RunOptions(script="s.py", nodes=2, arbiter=str(tmp_path)))
    assert "--replicate 2" in caught.value.hint


@pytest.mark.parametrize(
    ("nodes", "replicas", "words", "hint"),
    [
        (2, 2, "neither half may decide", "--arbiter DIR"),
        (4, 4, "neither half may decide", "an odd number"),
        (2, 3, "3 on 2 nodes", "more --nodes"),
    ],
)
def test_what_guards_against_nothing_is_refused(
    nodes: int, replicas: int, words: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_spec(RunOptions(script="s.py", nodes=nodes, replicate=replicas))
    assert hint in caught.value.hint


def test_a_torchft_job_has_a_lighthouse_that_is_not_replicated() -> None:
    pytest.importorskip("grpc")
    with pytest.raises(ConfigError, match="lighthouse"):
        make_spec(RunOptions(script="s.py", replicas=3, replicate=3))
