"""G2: four ranks that are forked from the image make contexts, after somebody asked for a GPU.

Passes where all four do so from a plain image, after `device_count`, and after `is_available` with
the variable that the keeper gives an image. Without the variable the question makes a context
in the image, and the image itself has to say that it may not be forked.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from perdure.keeper.execution import start_image
from perdure.keeper.zygote import (
    ForkFailed,
    ForkRanks,
    FromImage,
    Preload,
    RanksForked,
    Ready,
    Unfit,
)
from perdure.model.bus.wire import RankLaunch
from perdure.model.codec import decode, encode
from perdure.worker.system.process import set_subreaper
from tests.gpu.kit import ROOT, Trial

RANKS = 4
LIMIT_S = 30.0
CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
FIT = {"plain": "", "counted": "count", "asked": "available"}


def run(trial: Trial) -> None:
    set_subreaper()  # As the keeper is: it becomes the parent of forked ranks.
    wrong: list[str] = []
    for name, question in FIT.items() if not trial.dry else [("asked", "available")]:
        with Image(question) as image:
            reason = image.prove()
            trial.expect(RANKS)
            if reason:
                wrong.append(f"{name}: the image says that it is unfit: {reason}")
                continue
            wrong += [f"{name}: {text}" for text in fork_contexts(trial, image, name)]
    with Image(trial.choose("available", "thread"), **{CHECK: "0"}) as image:
        reason = image.prove()
        trial.note(unfit_says=reason)
        trial.expect(1)
        if reason:
            trial.passed()
        else:
            wrong.append("an image with a context says that it may be forked")
    assert not wrong, "; ".join(wrong)


class Image:
    """An image of the keeper's kind, and the line to it."""

    def __init__(self, question: str, **env: str) -> None:
        asks = {"PERDURE_GPU_ASKS": question}
        self.pid, self._sock = start_image("gpu-kit", 0, os.environ | asks | env)
        self._sock.settimeout(LIMIT_S)
        self._lines = self._sock.makefile("rb")
        self._names = ("tests.gpu.asks",) if question else ()

    def __enter__(self) -> "Image":
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._sock.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ask(self, message: Any, *kinds: type) -> Any:
        """Return the first answer of one of these kinds."""
        self._sock.sendall(encode(message) + b"\n")
        for line in self._lines:
            answer: FromImage = decode(line, FromImage)
            if isinstance(answer, kinds):
                return answer
        raise AssertionError("the image has ended without a word")

    def prove(self) -> str:
        """Return why it may not be forked; empty where it may."""
        answer = self.ask(Preload(self._names), Ready, Unfit)
        return answer.reason if isinstance(answer, Unfit) else ""


def fork_contexts(trial: Trial, image: Image, name: str, ranks: int = RANKS) -> list[str]:
    """Count each forked rank that makes a context; return what the others complain of."""
    outs = [trial.folder / f"{name}-{rank}" for rank in range(ranks)]
    launches = tuple(
        RankLaunch(rank, dict(os.environ), f"{out}.out", f"{out}.err", "")
        for rank, out in enumerate(outs)
    )
    plan = ForkRanks(
        generation=0, ranks=launches, script=str(Path(__file__).with_name("context_rank.py")),
        args=(trial.device,), module=False, no_python=False, cwd=str(ROOT), cold=False,
        job="gpu-kit", keeper=os.getpid(), traceback_files={}, imports="", why_cold="",
    )  # fmt: skip
    answer = image.ask(plan, RanksForked, ForkFailed)
    if isinstance(answer, ForkFailed):
        return [answer.reason]
    complaints = []
    for rank, pid in answer.pids.items():
        code = wait_for(pid)
        if code == 0:
            trial.took(float(Path(f"{outs[rank]}.out").read_text()))
            trial.passed()
            continue
        said = Path(f"{outs[rank]}.err").read_text().strip().splitlines()
        complaints.append(f"rank {rank} ended with {code}: {said[-1] if said else ''}")
    return complaints


def wait_for(pid: int) -> int:
    """Return the exit code of a child, which is killed when its time is over."""
    until_s = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])
