"""G7: checkpoints that are copied beside the next steps, with an optimizer plain and captured.

Passes where none fails, and each loads as the state was when it was taken. An optimizer that is
replayed from a CUDA graph calls no hook and counts no change: a script passes the gate before each
replay (`run.before_replay`), or its checkpoints are copied at once. Both are tried, and what a save
stalls is noted apart. On the CPU a change that torch does not count takes the place of a replay.

Layers are larger than a chunk of a copy, one lies in memory otherwise, and there are many small
tensors. What they are copied to has to be pinned, and the pinned blocks are those of the
second checkpoint ever after.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perdure.model.events import CheckpointFailed
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer, staging
from tests.gpu.kit import Trial

BESIDE = 5
"""Steps while a checkpoint is copied and written."""


class Net(nn.Module):
    """Two layers, the second of which lies in memory column by column, and many small tensors."""

    def __init__(self, width: int, large: int, count: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, large), nn.Linear(large, width)
        self.down.weight.data = self.down.weight.data.t().contiguous().t()
        self.shifts = nn.ParameterList(torch.zeros(width) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what comes out for each row."""
        return sum(self.shifts, self.down(self.up(inputs)))


class Trainee:
    """A model with its optimizer and its checkpoints."""

    def __init__(self, trial: Trial, place: Path, seed: int, captured: bool) -> None:
        torch.manual_seed(seed)
        self.trial, self.width = trial, trial.choose(2048, 128)
        large, count = trial.choose((5 * self.width // 2, 50), (self.width, 3))
        self.model = Net(self.width, large, count).to(trial.device)
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

    def train(self, steps: int, *, gated: bool = False) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=False)
            inputs = torch.randn(16, self.width, device=self.trial.device)
            self.model(inputs).square().mean().backward()
            if gated:
                self.saver.enter_replay()
            self.update()

    def capture(self) -> None:
        """Have updates pass torch by from now on."""
        if self.trial.dry:
            with play_capture():
                self.optimizer.step()
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


@contextlib.contextmanager
def play_capture() -> Iterator[None]:
    """Have the CPU seem to capture a graph."""
    asked, staging.is_capturing = staging.is_capturing, lambda: True
    try:
        yield
    finally:
        staging.is_capturing = asked


def run(trial: Trial) -> None:
    for what, captured, gated in (
        ("plain", False, False), ("gated", True, True), ("ungated", True, False),
    ):  # fmt: skip
        one = Trainee(trial, trial.folder / what, 1, captured)
        one.train(3)
        if captured:
            one.capture()
        stalls, pinned = [], []
        for number in trial.tries(trial.choose(5, 2)):
            stall_s = save_beside(one, number + 1, captured, gated=gated)
            assert stall_s is not None, f"{what}: it loads otherwise"
            stalls.append(stall_s)
            pinned.append(count_pinned(one))
        failed = [event.error for event in one.events if isinstance(event, CheckpointFailed)]
        trial.check(not failed, f"a sound checkpoint failed: {failed[:1]}")
        trial.check(len(set(pinned)) == 1, f"bytes pinned after each: {pinned}")
        trial.note(**{f"{what}_stalls_s": stalls, f"{what}_pinned_bytes": pinned[-1]})
    trial.note(state_bytes=sum(tensor.nbytes for tensor in one.list_state()))


def count_pinned(one: Trainee) -> int:
    """Return how much memory its copies have, which is pinned if there is something to pin."""
    memory = one.saver._staging
    kind = memory._pageable if one.trial.dry else memory._pinned
    places = [place for place in kind._places.values() if place.numel()]
    assert places
    assert one.trial.dry or all(place.is_pinned() for place in places), "they are not pinned"
    return kind.nbytes


def save_beside(one: Trainee, step: int, captured: bool, *, gated: bool) -> float | None:
    """Return what a checkpoint stalls, beside which training goes on; None: it loads otherwise."""
    one.train(1, gated=gated)
    taken = [tensor.detach().clone() for tensor in one.list_state()]
    stall_s = one.saver.save(step, reason="test", extra={})
    one.trial.took(stall_s)
    one.train(BESIDE, gated=gated)
    one.saver.close()
    changed = not any(map(torch.equal, one.model.parameters(), taken))
    assert changed, "the steps beside it changed nothing, so that this would show nothing"
    other = Trainee(one.trial, one.saver._root, 2, captured)
    if other.saver.restore({}) != step or not all(map(torch.equal, other.list_state(), taken)):
        return None
    return stall_s
