"""What torch has compiled for one rank is found by the others of its node, and by later lives.

So it is by a machine from elsewhere that stands in.

What it took to compile is not told as training.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.service.caches import FOLDERS
from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_elastic_nodes import read
from tests.e2e.test_join import Machine, events

Start = Callable[..., Job]


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said where caches are; torch does for its process as it compiles in a test."""
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_finds_what_its_neighbour_and_its_former_life_have_compiled(
    start: Start, tmp_path: Path
) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        "[checkpoint]\nevery_steps = 5\n"
        '[env]\nTORCHINDUCTOR_VEC_ISA_OK = "1"\n'  # It compiles much to find out.
    )
    job = start(
        "compiled", "-n", "2", "-c", str(config),
        str(SCRIPTS / "train_compiled.py"), "--notes", str(tmp_path),
    )  # fmt: skip
    assert job.wait() == 0, job.text()
    lives: dict[str, dict[str, Any]] = {
        life: json.loads((tmp_path / f"{life}.json").read_text())
        for life in ("g0-r0", "g0-r1", "g1-r0", "g1-r1")
    }
    found = {life: (one["hit"], one["miss"]) for life, one in lives.items()}
    # A graph forward, and one backward.
    assert found == {"g0-r0": (0, 2), "g0-r1": (2, 0), "g1-r0": (2, 0), "g1-r1": (2, 0)}, lives
    spent = {account: row["s"] for account, row in job.report()["ledger"].items()}
    for account, generation in (("startup", "g0"), ("reconfiguration.warmup", "g1")):
        took_s = sum(one["took_s"] for life, one in lives.items() if life.startswith(generation))
        assert spent[account] >= 0.7 * took_s, (spent, lives)  # The rest is what torch ran.
    place = job.folder / "compile-cache"
    for one in lives.values():
        assert one["env"].items() >= {n: str(place / f) for n, f in FOLDERS.items()}.items()
    assert list((place / "inductor" / "fxgraph").iterdir())
    journal = (job.folder / "journal.jsonl").read_text()
    assert '"warm":true' in journal
    assert '"warm":false' not in journal  # The image's environment is the ranks'.


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Return a function that has another machine join; the last of it is gone afterwards."""
    machines: list[Machine] = []

    def begin(invitation: str, name: str = "first") -> Machine:
        (tmp_path / name).mkdir()
        machines.append(Machine(tmp_path / name, invitation))
        return machines[-1]

    yield begin
    for machine in machines:
        machine.vanish()


def read_log(machine: Machine, name: str, node: int) -> str:
    return (Path(machine.home) / "jobs" / name / "logs" / f"agent-{node}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", ["", pytest.param("own", marks=pytest.mark.long)], ids=["default", "own"]
)
def test_a_machine_that_stands_in_finds_what_the_node_before_has_compiled(
    start: Start,
    join: Callable[..., Machine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
) -> None:
    """It has never compiled; its cache is another folder, in another PERDURE_HOME."""
    (tmp_path / "killed").touch()  # Nobody is to end itself.
    config = tmp_path / "job.toml"
    config.write_text(
        "[checkpoint]\nevery_steps = 20\n"
        '[env]\nTORCHINDUCTOR_VEC_ISA_OK = "1"\n'  # It compiles much to find out.
    )
    job = start(
        "far", "-n", "1", "--spares", "1", "--remote", "1", "-c", str(config),
        str(SCRIPTS / "train_compiled.py"), "--notes", str(tmp_path), "--steps", "100000",
    )  # fmt: skip
    job.wait_until((job.folder / "credentials" / "joiner.json").exists, "credentials")
    monkeypatch.setenv("PERDURE_COMPILE_CACHE", said)
    machine = join(job.cli("invite", "far").stdout)
    job.wait_until(lambda: events(job, "InvitationUsed"), "the machine's place")
    job.wait_step(60)  # At .05 s: what was compiled has settled.
    job.cli("evict", "far", "0")
    moved = tmp_path / "g1-r0.json"
    job.wait_until(moved.exists, "a first step on the other machine")
    before, after = (json.loads((tmp_path / f"g{g}-r0.json").read_text()) for g in (0, 1))
    own = Path(machine.home) / "jobs" / "far" / "compile-cache"
    assert after["env"]["TORCHINDUCTOR_CACHE_DIR"] == str(own / "inductor")
    assert before["env"]["TORCHINDUCTOR_CACHE_DIR"] == str(
        job.folder / "compile-cache" / "inductor"
    )
    assert (before["hit"], before["miss"]) == (0, 2)
    assert (after["hit"], after["miss"]) == ((0, 2) if said else (2, 0)), after
    log = read_log(machine, "far", 1)
    assert ("what node 0 has compiled: " in log) == (not said)
    assert "cannot be taken" not in log
    job.cli("stop", "far", "--now")
    job.wait()


@pytest.mark.slow
@pytest.mark.long
def test_a_machine_that_joins_an_elastic_world_finds_it_while_the_others_train_on(
    start: Start, join: Callable[..., Machine], tmp_path: Path
) -> None:
    trail, config = tmp_path / "trail", tmp_path / "job.toml"
    config.write_text('[env]\nTORCHINDUCTOR_VEC_ISA_OK = "1"\n')
    job = start(
        "far", "-n", "1", "--nodes", "2", "--remote", "1", "-c", str(config),
        str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "100000", "--pace-s", "0.05",
        "--compiled",
    )  # fmt: skip
    job.wait_until((job.folder / "credentials" / "joiner.json").exists, "credentials")
    invitation = job.cli("invite", "far", "--uses", "2").stdout
    first = join(invitation, "first")
    job.wait_until(lambda: len(read(trail, 0)) >= 60, "training on both")
    first.vanish()
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0], "the other one going on")
    join(invitation, "second")
    job.wait_until(lambda: read(trail, 1)[-1]["world"] == [0, 3], "a step of the second machine")
    found = {row["pid"]: (row["hit"], row["miss"]) for row in read(trail, 1)}
    assert list(found.values()) == [(0, 2), (2, 0)], "who was there from the beginning compiled"
    job.cli("stop", "far", "--now")
    job.wait()


@pytest.mark.slow
@pytest.mark.long
def test_what_the_first_step_compiles_is_start_up_and_after_a_restart_warm_up(
    start: Start, tmp_path: Path
) -> None:
    config, compile_s = tmp_path / "job.toml", 10.0
    config.write_text("[checkpoint]\nevery_steps = 5\n")
    job = start(
        "slow", "-n", "2", "-c", str(config),
        str(SCRIPTS / "train_compiled.py"), "--notes", str(tmp_path), "--slow-s", str(compile_s),
    )  # fmt: skip
    assert job.wait() == 0, job.text()
    report = job.report()
    spent = {account: row["s"] for account, row in report["ledger"].items()}
    both_s = 2 * compile_s
    assert spent["startup"] >= both_s, spent
    assert spent["reconfiguration.warmup"] >= both_s, spent
    assert spent["useful"] < both_s, spent  # 24 steps of 0.06 s, of a machine that may be busy.
    assert sum(spent.values()) == pytest.approx(report["slot_s"], rel=1e-3)
    assert spent["unattributed"] <= 0.02 * report["slot_s"], spent
