"""Ranks of an experiment: forked from a process that has torch imported and has run no operator."""

import tempfile
from collections.abc import Callable, Collection
from typing import Any

from tests.contract.communicator_ranks import BUILD_S, Rank, read_answers, run
from tests.gpu.kit import Trial


def fork_ranks(
    trial: Trial,
    body: Callable[[Rank], None],
    *,
    size: int = 2,
    engine: str = "",
    build_s: float = 0.0,
    limit_s: float = 60.0,
    killed: Collection[int] = (),
) -> dict[int, Any]:
    """Run `body` in each rank; return what they have answered.

    Raises:
        AssertionError: one has failed; those `killed` are to end by SIGKILL.
    """
    with tempfile.TemporaryDirectory(dir=trial.folder) as folder:
        complaints = run(
            body, engine or trial.engine, folder, size=size,
            build_s=build_s or trial.choose(10.0, BUILD_S),
            limit_s=limit_s, killed=killed,
        )  # fmt: skip
        for text in complaints:
            print(text, flush=True)
        last = [line for text in complaints[:1] for line in text.splitlines() if line.strip()]
        assert not complaints, f"{complaints[0].partition(':')[0]}: {last[-1]}"
        return read_answers(folder, size)
