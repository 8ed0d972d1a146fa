"""Published libraries save, any rank is killed during a save, and each life goes on.

The formats written by hand, with a stricter account: tests/e2e/test_own_checkpoints.py.
"""

import importlib.util
import itertools
import json
import random
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import start  # noqa: F401  (a fixture)
from tests.e2e.exact import Start
from tests.e2e.own_kills import read_lives

SCRIPT = Path(__file__).resolve().parent / "scripts" / "own_saves.py"
KILLS, RANKS = 3, 2
PATTERNS = {
    "transformers": "out/checkpoint-*",
    "lightning": "out/*.ckpt",
    "accelerate": "out/checkpoint-*",
    "safetensors": "out/*.safetensors",
    "dcp": "out/step-*",
}
SHORT = ("transformers", "dcp")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.torch]


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=() if f in SHORT else pytest.mark.long) for f in PATTERNS],
)
def test_each_life_goes_on_from_the_newest_whole_one(
    start: Start,  # noqa: F811
    tmp_path: Path,
    form: str,
) -> None:
    if form != "dcp" and importlib.util.find_spec(form) is None:
        pytest.skip(f"{form} is not installed: pip install -e .[thirdparty]")
    (tmp_path / "job.toml").write_text(
        f"script = {json.dumps(str(SCRIPT))}\nargs = {json.dumps([form])}\nnproc = {RANKS}\n"
        f"[checkpoint]\nown = {json.dumps([PATTERNS[form]])}\n[restart]\nmax_restarts = 50\n"
    )
    job, chance = start("own", "-c", "job.toml"), random.Random(form)

    def has_saved(life: int) -> bool:
        lives = read_lives(tmp_path)
        return len(lives) > life and sum(word == "saving" for word, _ in lives[life]) >= 3

    for life in range(KILLS):
        job.wait_until(lambda life=life: has_saved(life), f"saves of life {life}")
        time.sleep(chance.uniform(0.0, 0.5))  # The instant of the kill; nothing depends on it.
        job.kill(f"perdure rank own g{life} r{chance.randrange(RANKS)}")
    job.wait_until(lambda: has_saved(KILLS), "saves of the last life")
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()[-4000:]
    assert job.state()["restarts"] == KILLS, "a life failed to load"
    lives = read_lives(tmp_path)
    for before, after in itertools.pairwise(lives):
        whole = max(step for word, step in before if word in ("began", "saved"))
        newest = max(step for _, step in before)
        assert whole <= after[0][1] <= newest, (before[-3:], after[0])
