"""A checkpoint of a script whose updates nobody sees is that of one step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]


@pytest.mark.parametrize("words", [[], pytest.param(["--gated"], marks=pytest.mark.long)])
def test_updates_that_pass_the_optimizer_by_tear_no_checkpoint(
    start: Start, tmp_path: Path, words: list[str]
) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[checkpoint]\nevery_steps = 2\nkeep_last = 10\n")
    job = start("replays", "-n", "1", "-c", str(config), str(SCRIPTS / "train_replays.py"), *words)
    assert job.wait() == 0, job.text()
    seen = {}
    for folder in sorted((job.folder / "checkpoints").glob("step-*")):
        dcp_to_torch_save(folder, tmp_path / "whole.pt")
        weight = torch.load(tmp_path / "whole.pt")["model.model.weight"]
        seen[int(folder.name.partition("-")[2])] = (weight.min().item(), weight.max().item())
    assert seen == {step: (step, step) for step in range(2, 13, 2)}
