"""`perdure doctor FILE.py`: what one step hands to the next, and no checkpoint has."""

from pathlib import Path

import pytest

from perdure.cli.looking.doctor import find_carried
from perdure.model.errors import ConfigError

SCRIPT = """
import numpy as np
import perdure

run = perdure.init()
rng, mean, best = np.random.default_rng(1), 1.0, 9.0
generator = np.random.default_rng(2)
run.register(model=model, queue=queue)
for step in run.steps(10):
    loss = train(generator.normal()) / mean
    mean = 0.9 * mean + 0.1 * loss
    best = min(best, loss)
    queue.append(loss)
    lowest.append(loss)
    weights = lowest[-1] * 2
    print(best)
    use(weights, queue)
"""


def test_it_lists_what_a_loop_hands_on_and_uses(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    names = [line.split(" has ")[1].split(",")[0] for line in find_carried(str(path))]
    assert names == ["mean", "lowest", "generator"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        find_carried(str(tmp_path / "none.py"))
