"""Forward and backward of one stage's blocks, micro-batch by micro-batch.

A stage is cut into pieces, each with a graph of its own: the whole stage where nothing asks for
more, else every block by itself. With recompute a piece keeps only its input, and its graph is
made again before its backward. Random generators are seeded before each block by (seed, step,
micro-batch, block): what a block draws depends neither on the stage that it is in nor on what
ran before it, and a second forward needs no state of the first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.moving import map_tensors
from perdure.worker.pipeline.messages import list_tensors

Loss = Callable[[Any, Any], Tensor]
Gradients = list[Tensor | None]
"""One for each tensor that a piece takes or returns; None where there is none."""
Want = Literal["all", "inputs", "split"]
"""Gradients of inputs and weights; of inputs only; of inputs now, and of weights when asked for."""


@dataclass(slots=True)
class Pass:
    """The parts of a micro-batch that a stage keeps between its forward and last backward."""

    step: int
    micro_batch: int
    target: Any = None
    trained: bool = False
    """Whether gradients of what its forward has made so far are wanted."""
    runs: list[tuple[Any, Any]] = field(default_factory=list)
    """By piece: what it took, leaves of its graph; what it returned, or is to be made again."""
    weights: list[Callable[[], object]] = field(default_factory=list)
    """Backward of weights that was put off."""
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    """By block, where blocks are apart: of its trained parameters, in their order."""


class StageBlocks:
    """The blocks of one stage, as one cell computes them."""

    def __init__(
        self, stage: int, blocks: Sequence[nn.Module], first: int, *, recompute: bool = False
    ) -> None:
        """Take `blocks`, whose first is the model's block number `first`."""
        self.stage, self.blocks, self.first = stage, list(blocks), first
        self.recompute = recompute
        self.seed = 0
        self.loss: Loss | None = None
        """Of the last stage: part of its last piece."""
        self.apart = False
        """Each block is a piece, also without recompute: sums are then made in one order."""
        self.taken: tuple[Any, Pass] | None = None
        """What the newest forward took."""

    def forward(self, value: Any, kept: Pass, *, grads: bool) -> Any:
        """Return what the blocks make of `value`; with `grads`, it is leaves of a graph."""
        self.taken = value, Pass(kept.step, kept.micro_batch, kept.target)
        for at, piece in enumerate(self._pieces()):
            leaves = make_leaves(value, trained=kept.trained) if grads else value
            grads = True
            kept.trained |= any(leaf.requires_grad for leaf in _leaves(leaves))
            kept.trained |= any(p.requires_grad for block in piece for p in block.parameters())
            with torch.set_grad_enabled(not self.recompute):
                value = self._compute(at, leaves, kept)
            kept.runs.append((leaves, None if self.recompute else value))
        return value

    def forward_again(self) -> Any:
        """Return what the blocks make of what they took last; it stays as it is."""
        assert self.taken is not None
        value, kept = map_tensors(self.taken[0], Tensor.clone), self.taken[1]
        for at in range(len(self._pieces())):
            value = self._compute(at, value, kept)
        return value

    def mark_differing(self, value: Any, kept: Pass) -> list[bool]:
        """Return for which tensors of `value`, that `forward` made, a gradient is wanted."""
        return [
            kept.trained and tensor.is_floating_point() if self.recompute else tensor.requires_grad
            for tensor in list_tensors(value)
        ]

    def backward(self, grads: Gradients | None, kept: Pass, want: Want) -> Gradients:
        """Return the gradients of the stage's input; those of weights are added to `p.grad`.

        `grads` are those of its output; None for a loss. Where blocks are apart, those of weights
        are taken from `p.grad` block by block: what two blocks share has a gradient in each.
        """
        pieces = self._pieces()
        found: Gradients = []
        for at in range(len(pieces) - 1, -1, -1):
            taken, made = kept.runs.pop()
            if self.recompute:
                made = self._compute(at, taken, kept)
            every = (p for block in pieces[at] for p in block.parameters() if p.requires_grad)
            weights = list(dict.fromkeys(every))
            found = _backward(taken, made, grads, want, weights, kept.weights)
            grads = found
            if self.apart and want != "inputs":
                take = partial(_take_gradients, weights, self.first + at, kept)
                if want == "split":
                    kept.weights.append(take)
                else:
                    take()
        return found

    def backward_weights(self, kept: Pass) -> None:
        """Add the gradients of weights that `backward` has put off."""
        while kept.weights:
            kept.weights.pop(0)()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return all of its blocks'."""
        return (p for block in self.blocks for p in block.parameters())

    def _pieces(self) -> list[list[nn.Module]]:
        alone = self.recompute or self.apart
        return [[block] for block in self.blocks] if alone else [self.blocks]

    def _compute(self, at: int, value: Any, kept: Pass) -> Any:
        pieces = self._pieces()
        for index, block in enumerate(pieces[at], self.first + sum(map(len, pieces[:at]))):
            self._seed(kept, index)
            value = block(value)
        if self.loss is not None and at == len(pieces) - 1:
            self._seed(kept, self.first + len(self.blocks))
            value = self.loss(value, kept.target)
        return value

    def _seed(self, kept: Pass, block: int) -> None:
        seed_all(derive_seed(self.seed, "block", kept.step, kept.micro_batch, block))


def make_leaves(value: Any, *, trained: bool = False) -> Any:
    """Return `value` cut off its graph; what took part in it takes part in the next.

    What was made without a graph takes part if anything before it is `trained`.
    """
    leaves = [
        t.detach().requires_grad_(t.requires_grad or (trained and t.is_floating_point()))
        for t in list_tensors(value)
    ]
    return leaves[0] if isinstance(value, Tensor) else tuple(leaves)


def _leaves(value: Any) -> list[Tensor]:
    """Return the tensors of `value`, or none of what only a loader understands."""
    found = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _backward(
    taken: Any, made: Any, grads: Gradients | None, want: Want,
    weights: Sequence[nn.Parameter], later: list[Callable[[], object]],
) -> Gradients:  # fmt: skip
    leaves = _leaves(taken)
    given = grads if grads is not None else [torch.ones_like(t) for t in list_tensors(made)]
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(list_tensors(made), given, strict=True)
        if tensor.requires_grad and grad is not None
    ]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        return [None] * len(leaves)
    outputs, seeds = [t for t, _ in pairs], [g for _, g in pairs]
    if want == "inputs":
        if inputs:
            found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
            for leaf, grad in zip(inputs, found, strict=True):
                leaf.grad = grad
    elif want == "split" and not inputs:  # All of the backward can wait.
        later.append(lambda: torch.autograd.backward(outputs, seeds))
    elif want == "split":
        later.append(_split(outputs, inputs, seeds, weights))
    else:
        torch.autograd.backward(outputs, seeds)
    return [_take(leaf) for leaf in leaves]


def _split(
    outputs: list[Tensor],
    inputs: list[Tensor],
    seeds: list[Tensor],
    weights: Sequence[nn.Parameter],
) -> Callable[[], object]:
    """Set the inputs' gradients, and return what adds those of the weights.

    torch's own schedules split a backward in the same way.
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    # It detaches the outputs in place, which a view refuses.
    outputs = [t.clone() if t._is_view() else t for t in outputs]
    used = _map_used_leaves(outputs)
    _, groups = stage_backward_input(outputs, seeds, inputs, iter(weights))
    found = {node for group in groups for node in group["params"]}
    if any(id(p) in used and used[id(p)] not in found for p in weights):
        raise ConfigError(
            "pipeline: a stage has weights that its input has no part in: their gradients cannot "
            "be put off",
            hint="use a schedule that does not split the backward, such as 1f1b",
        )
    return lambda: stage_backward_weight(iter(weights), groups)


def _map_used_leaves(outputs: Sequence[Tensor]) -> dict[int, Any]:
    """Return the node of each leaf that `outputs` depend on, by the leaf's id."""
    found: dict[int, Any] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = node
        waiting += [following for following, _ in node.next_functions]
    return found


def _take_gradients(weights: Sequence[nn.Parameter], block: int, kept: Pass) -> None:
    """Take the gradients of `weights`, and as a last tensor which of them have one."""
    if any(p.grad is not None and p.grad.layout != torch.strided for p in weights):
        raise ConfigError(
            f"elastic: block {block} makes a sparse gradient, and members sum dense ones",
            hint="use sparse=False, as in nn.Embedding(..., sparse=False)",
        )
    used = torch.tensor([float(p.grad is not None) for p in weights])
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in weights]
    kept.gradients[block] = [*found, *([used.to(found[0].device)] if found else [])]
    for p in weights:
        p.grad = None


def _take(leaf: Tensor) -> Tensor | None:
    grad, leaf.grad = leaf.grad, None
    return grad
