"""A group of real gloo breaks alone: the process's other groups, the script's own too, go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

import torch.distributed as dist

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("when", ["at once", "lazy"])
def test_a_break_leaves_the_other_groups_of_both_ranks_whole(when: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.gloo_rank", str(store.port), when],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ranks:
        try:
            # The end of their input ends the ranks: read beside it.
            assert ranks.stdout is not None
            assert ranks.stderr is not None
            errors = {}
            for _ in range(2):
                words = ranks.stdout.readline()
                assert words, ranks.stderr.read()[-3000:]
                said = json.loads(words)
                errors[said["rank"]] = said["error"]
                assert said["before"] == dict.fromkeys([*said["after"], "mirror"], True)
                assert said["after"] == dict.fromkeys(["default", "pair", "own", "training"], True)
            assert errors.keys() == {0, 1}
            assert "closed" in errors[1].lower(), errors
        finally:
            ranks.kill()
            ranks.communicate(timeout=PATIENCE_S)
