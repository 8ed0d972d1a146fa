"""What the blocks of a model cost: each run as a pipeline's stage runs it, round after round.

In each round every block is run once, so that whatever else the machine does in one moment is
spread over all of them; the first rounds warm up and do not count. Bytes are counted and not
measured: what a forward leaves for its backward is what autograd has saved, each storage once.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from perdure.model.planning.costs import Block, BlockCost
from perdure.plan.worlds.measures import Figure, settle
from perdure.worker.elastic.moving import map_tensors
from perdure.worker.pipeline.messages import list_tensors
from perdure.worker.pipeline.stage import Loss, Pass, StageBlocks

ROUNDS_MIN = 7
ROUNDS_MAX = 200
_WARM = 2

Say = Callable[[str], object]


class Samples(msgspec.Struct):
    """Seconds, a round each."""

    forward: list[float] = msgspec.field(default_factory=list)
    recompute: list[float] = msgspec.field(default_factory=list)
    backward: list[float] = msgspec.field(default_factory=list)
    weight: list[float] = msgspec.field(default_factory=list)


class Figures(msgspec.Struct, frozen=True):
    """All that was found of the blocks."""

    blocks: tuple[Block, ...]
    base_bytes: int
    """What the process took before any block was on its device."""
    spread: float
    spread_of: str
    notes: tuple[str, ...]


class BlockMeter:
    """Measures one model."""

    def __init__(
        self, blocks: Sequence[nn.Module], loss: Loss, *, seconds: float, say: Say
    ) -> None:
        """Measure `blocks` for `seconds` a micro-batch size at least; `say` hears of progress."""
        self.parts = [StageBlocks(0, [block], index) for index, block in enumerate(blocks)]
        self.parts[-1].loss = loss
        self.names = [f"{i} {type(block).__name__}" for i, block in enumerate(blocks)]
        self.seconds, self.say = seconds, say
        self.notes: list[str] = []
        self._splits = [True] * len(self.parts)
        self._worst = Figure(0.0, 0.0)
        self._worst_of = ""

    def measure(
        self,
        batches: Mapping[int, tuple[Any, Any]],
        optimizer: Callable[[Any], Any],
        base_bytes: int = 0,
    ) -> Figures:
        """Return the costs of all blocks, by the micro-batch sizes of `batches`.

        Raises:
            MeasureError: a figure could not be had.
            ConfigError: a block returns what cannot go to another rank.
        """
        found: list[dict[int, BlockCost]] = [{} for _ in self.parts]
        for size, (inputs, targets) in sorted(batches.items()):
            sizes = self._count_bytes(inputs, targets)
            samples = self._sample(size, inputs, targets)
            for index, mine in enumerate(samples):
                found[index][size] = self._settle(index, size, mine, *sizes[index])
        state = self._measure_optimizer(optimizer)
        blocks = tuple(
            Block(name, *state[index], costs=found[index]) for index, name in enumerate(self.names)
        )
        return Figures(blocks, base_bytes, self._worst.spread, self._worst_of, tuple(self.notes))

    # --- time -----------------------------------------------------------------------------------

    def _sample(self, size: int, inputs: Any, targets: Any) -> list[Samples]:
        for _ in range(_WARM):
            self._round(inputs, targets, [Samples() for _ in self.parts])
        samples = [Samples() for _ in self.parts]
        began, rounds = time.monotonic(), 0
        while rounds < ROUNDS_MIN or (
            time.monotonic() - began < self.seconds and rounds < ROUNDS_MAX
        ):
            self._round(inputs, targets, samples)
            rounds += 1
        self.say(f"micro-batch {size}: {rounds} rounds of {len(self.parts)} blocks")
        return samples

    def _round(self, value: Any, targets: Any, samples: Sequence[Samples]) -> None:
        """Run each block twice: its backward whole, and then in two parts."""
        for index, part in enumerate(self.parts):
            kept = Pass(0, 0, targets)
            began = _clock()
            made = part.forward(value, kept, grads=index > 0)
            forwarded = _clock()
            grads = self._make_gradients(index, made)
            ready = _clock()
            part.backward(grads, kept, "all")
            ended = _clock()
            samples[index].forward.append(forwarded - began)
            samples[index].backward.append(ended - ready)
            again = Pass(0, 0, targets)
            began = _clock()
            part.forward(value, again, grads=index > 0)
            samples[index].recompute.append(_clock() - began)
            if self._splits[index]:
                self._split(index, grads, again, samples[index])
            if index + 1 < len(self.parts):
                value = _detach(made)

    def _split(self, index: int, grads: Any, kept: Pass, samples: Samples) -> None:
        part = self.parts[index]
        try:
            part.backward(grads, kept, "split")
            began = _clock()
            part.backward_weights(kept)
            samples.weight.append(max(_clock() - began, 1e-9))
        except RuntimeError as error:
            self._splits[index] = False
            why = str(error).strip().splitlines()[0]
            self.notes.append(f"{self.names[index]}: its backward cannot be split: {why}")

    def _make_gradients(self, index: int, made: Any) -> Any:
        if index + 1 == len(self.parts):
            return None
        return [torch.ones_like(t) if t.requires_grad else None for t in list_tensors(made)]

    def _settle(
        self, index: int, size: int, samples: Samples, taken: int, stored: int
    ) -> BlockCost:
        name = self.names[index]

        def figure(kind: str) -> float:
            what = f"{kind} of block {name}, micro-batch {size}"
            found = settle(getattr(samples, kind), what)
            if found.spread > self._worst.spread:
                self._worst, self._worst_of = found, what
            return found.value

        backward_s = figure("backward")
        return BlockCost(
            forward_s=figure("forward"),
            backward_s=backward_s,
            recompute_s=figure("recompute"),
            input_bytes=taken,
            stored_bytes=stored,
            weight_s=min(figure("weight"), backward_s) if self._splits[index] else None,
        )

    # --- bytes ----------------------------------------------------------------------------------

    def _count_bytes(self, inputs: Any, targets: Any) -> list[tuple[int, int]]:
        """Return the bytes that each block takes, and those that its forward leaves."""
        found = []
        value = inputs
        for index, part in enumerate(self.parts):
            known = {_place(t) for t in part.parameters()}
            known |= {_place(t) for block in part.blocks for t in block.buffers()}
            taken = find_tensors(value)
            saved = {_place(t): _size(t) for t in taken}
            note = functools.partial(_note, saved, known)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                made = part.forward(value, Pass(0, 0, targets), grads=index > 0)
            found.append((sum(t.nbytes for t in taken), sum(saved.values())))
            if index + 1 < len(self.parts):
                value = _detach(made)
        return found

    # --- state ----------------------------------------------------------------------------------

    def _measure_optimizer(
        self, optimizer: Callable[[Any], Any]
    ) -> list[tuple[int, int, int, float]]:
        """Return (parameter, gradient and optimizer bytes, update seconds) of each block.

        A step is measured as a whole, and shared out by the bytes that it touches.
        """
        params = [p for part in self.parts for p in part.parameters()]
        for p in params:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        made = optimizer(iter(params))
        took: list[float] = []
        trained = any(p.requires_grad for p in params)
        for _ in range(_WARM + ROUNDS_MIN if trained else 0):
            began = _clock()
            made.step()
            took.append(_clock() - began)
        whole_s = settle(took[_WARM:], "the optimizer's step").value if trained else 0.0
        found = []
        for part in self.parts:
            mine = list(part.parameters())
            state = sum(t.nbytes for p in mine for t in find_tensors(made.state.get(p, {})))
            gradients = sum(p.nbytes for p in mine if p.requires_grad)
            found.append((sum(p.nbytes for p in mine), gradients, state))
        touched = [2 * gradients + state for _, gradients, state in found]
        total = sum(touched) or 1
        return [(*sizes, whole_s * t / total) for sizes, t in zip(found, touched, strict=True)]


def find_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a collection."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def _note(saved: dict[int, int], known: set[int], tensor: Tensor) -> Tensor:
    if _place(tensor) not in known:
        saved[_place(tensor)] = _size(tensor)
    return tensor


def _detach(value: Any) -> Any:
    kept = [t.detach().requires_grad_(t.requires_grad) for t in list_tensors(value)]
    return kept[0] if isinstance(value, Tensor) else tuple(kept)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _size(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _clock() -> float:
    """Return the time; a GPU has done by then what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
