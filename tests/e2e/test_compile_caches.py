"""What torch has compiled for one rank is found by the others of its node, and by later lives.

What it took to compile is not told as training.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.service.caches import FOLDERS
from tests.e2e.harness import SCRIPTS, Job

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
