"""G7: checkpoints that are copied beside the next steps, with an optimizer plain and captured.

Passes where none is called torn, and each loads as the state was when it was taken. An optimizer
that is replayed from a CUDA graph calls no hook and counts no change: there the script waits by
`settle` before each replay. What a script gets that does not is noted (`ungated_wrong`), and no
failure. On the CPU a change that torch does not count takes the place of a replay.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perdure.model.events import CheckpointFailed
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer
from tests.gpu.kit import Trial

BESIDE = 5
"""Steps while a checkpoint is copied and written."""


class Trainee:
    """A model with its optimizer and its checkpoints."""

    def __init__(self, trial: Trial, place: Path, seed: int, captured: bool) -> None:
        torch.manual_seed(seed)
        self.trial, self.width = trial, trial.choose(2048, 128)
        layers = [nn.Linear(self.width, self.width) for _ in range(trial.choose(4, 2))]
        self.model = nn.Sequential(*layers).to(trial.device)
        options = {"capturable": True} if captured and not trial.dry else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.events: list[Any] = []
        self.saver = Checkpointer(
            url=str(place), config=CheckpointConfig(), rank=0, world_size=1, generation=0,
            emit=self.events.append, now=lambda: 0.0,
        )  # fmt: skip
        self.saver.register("model", self.model)
        self.saver.register("optimizer", self.optimizer)
        self.update: Callable[[], object] = self.optimizer.step

    def train(self, steps: int, *, settle: bool = False) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=False)
            inputs = torch.randn(16, self.width, device=self.trial.device)
            self.model(inputs).square().mean().backward()
            if settle:
                self.saver.settle()
            self.update()

    def capture(self) -> None:
        """Have updates pass torch by from now on."""
        if self.trial.dry:
            self.update = self.update_uncounted
            return
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        self.update = graph.replay

    def update_uncounted(self) -> None:
        parameters = tuple(self.model.parameters())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameters):
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=-0.1)

    def list_state(self) -> list[Tensor]:
        moments = [
            row[name]
            for row in self.optimizer.state_dict()["state"].values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return [*self.model.state_dict().values(), *moments]


def run(trial: Trial) -> None:
    for captured in (False, True):
        one = Trainee(trial, trial.folder / f"captured-{captured}", 1, captured)
        one.train(3)
        if captured:
            one.capture()
        for number in trial.tries(trial.choose(5, 2)):
            what = "captured" if captured else "plain"
            assert is_kept(one, number + 1, captured, settle=captured), (
                f"{what}: it loads otherwise"
            )
        failed = [event.error for event in one.events if isinstance(event, CheckpointFailed)]
        trial.check(not failed, f"a sound checkpoint failed: {failed[:1]}")
        trial.check(not one.saver._staging.torn, "a sound checkpoint was called torn")
    tries = trial.choose(5, 1)
    wrong = sum(not is_kept(one, 100 + number, True, settle=False) for number in range(tries))
    trial.note(ungated=tries, ungated_wrong=wrong)
    trial.note(state_bytes=sum(tensor.nbytes for tensor in one.list_state()))


def is_kept(one: Trainee, step: int, captured: bool, *, settle: bool) -> bool:
    """Return whether a checkpoint, beside which training goes on, loads as it was taken."""
    one.train(1, settle=settle)
    taken = [tensor.detach().clone() for tensor in one.list_state()]
    one.trial.took(one.saver.save(step, reason="test", extra={}))
    one.train(BESIDE, settle=settle)
    one.saver.close()
    changed = not any(map(torch.equal, one.model.parameters(), taken))
    assert changed, "the steps beside it changed nothing, so that this would show nothing"
    other = Trainee(one.trial, one.saver._root, 2, captured)
    if other.saver.restore({}) != step:
        return False
    return all(map(torch.equal, other.list_state(), taken))
