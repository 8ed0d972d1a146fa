"""Every engine keeps what `Group` builds upon; the fake one too, or its tests prove nothing."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.contract.communicator_ranks import CONTRACTS

ON_CPU = ("gloo", "fake", "split")
NCCL, SPLIT_NCCL = (
    pytest.param(
        engine,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    )
    for engine in ("nccl", "split-nccl")
)
pytestmark = pytest.mark.torch


@functools.cache
def find_complaints(*engines: str) -> dict[str, dict[str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.communicator_ranks", *engines],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", [*ON_CPU, NCCL, SPLIT_NCCL])
@pytest.mark.parametrize("contract", [one.__name__ for one in CONTRACTS])
def test_an_engine_keeps_a_contract(contract: str, engine: str) -> None:
    engines = ON_CPU if engine in ON_CPU else (engine,)
    assert find_complaints(*engines)[engine][contract] == []
