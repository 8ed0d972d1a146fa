"""`perdure profile`: a script's own call of `perdure.elastic.train` measures instead of training.

What was measured is kept under a fingerprint of all that it depends on: of the model its blocks,
their code, shapes and settings; of the machine its processor, torch and threads. The links'
figures are kept by themselves, for they are the same for every model.

Blocks are run as a pipeline's stage runs them, round after round (`BlockMeter`). In each round
every block is run once with each micro-batch size, so that whatever else the machine does in one
moment is spread over all of them; the first rounds warm up and do not count. Bytes are counted and
not measured: what a forward leaves for its backward is what autograd has saved, each storage once.
"""

import functools
import hashlib
import inspect
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from perdure.files import replace_file
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError, ProtocolError
from perdure.model.planning.costs import (
    ASK,
    Block,
    BlockCost,
    CostProfile,
    ProfileReport,
    ProfileRequest,
    Shared,
    write_profile,
)
from perdure.plan.elastic.microbatches import plan_batches
from perdure.plan.worlds.measures import settle
from perdure.worker.data import MicroBatches
from perdure.worker.elastic import list_blocks
from perdure.worker.elastic.moving import collect_tensors, map_tensors
from perdure.worker.elastic.state.blocks import find_shared
from perdure.worker.elastic.state.replicated import make_model
from perdure.worker.pipeline.messages import list_tensors
from perdure.worker.pipeline.stage import Loss, Pass, StageBlocks, make_leaves
from perdure.worker.rng import take_fingerprint
from perdure.worker.system.stderr import say

ROUNDS_MIN = 7
ROUNDS_MAX = 200
_WARM = 2

Say = Callable[[str], object]


Samples = defaultdict[str, list[float]]
"""What is done (forward, recompute, backward, weight) -> its seconds, a round each."""


class Figures(msgspec.Struct, frozen=True):
    """All figures that were measured of the blocks."""

    blocks: tuple[Block, ...]
    base_bytes: int
    """What the process took before any block was on its device."""
    spread: float
    spread_of: str
    notes: tuple[str, ...]
    shared: tuple[Shared, ...] = ()


class BlockMeter:
    """Measures one model."""

    def __init__(
        self, blocks: Sequence[nn.Module], loss: Loss, *, seconds: float, say: Say
    ) -> None:
        """Measure `blocks` for `seconds` a micro-batch size at least; `say` hears of progress."""
        self.parts = [StageBlocks(0, [block], index) for index, block in enumerate(blocks)]
        self.parts[-1].loss = loss
        self._shared = find_shared(blocks)
        self.names = [f"{i} {type(block).__name__}" for i, block in enumerate(blocks)]
        self.seconds, self.say = seconds, say
        self.notes: list[str] = []
        self._splits = [True] * len(self.parts)
        self._spreads = [(0.0, "")]
        """Of each figure, and what it is of."""

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
        counts = {size: self._count_bytes(*batch) for size, batch in sorted(batches.items())}
        for size, samples in self._sample(batches).items():
            for index, mine in enumerate(samples):
                found[index][size] = self._settle(index, size, mine, *counts[size][index])
        state, shared = self._measure_optimizer(optimizer)
        blocks = tuple(
            Block(name, *state[index], costs=found[index]) for index, name in enumerate(self.names)
        )
        return Figures(blocks, base_bytes, *max(self._spreads), tuple(self.notes), shared)

    # --- time -----------------------------------------------------------------------------------

    def _sample(self, batches: Mapping[int, tuple[Any, Any]]) -> dict[int, list[Samples]]:
        """Return what each block took with each micro-batch size; the sizes take turns."""
        samples: dict[int, list[Samples]] = {}
        began, rounds = time.monotonic(), -_WARM
        while rounds < ROUNDS_MIN or (
            time.monotonic() - began < self.seconds * len(batches) and rounds < ROUNDS_MAX
        ):
            if rounds == 0:
                began, samples = time.monotonic(), {}
            for size, batch in sorted(batches.items()):
                mine = samples.setdefault(size, [Samples(list) for _ in self.parts])
                self._round(*batch, mine)
            rounds += 1
        sizes = ", ".join(map(str, sorted(batches)))
        self.say(f"micro-batch {sizes}: {rounds} rounds of {len(self.parts)} blocks")
        return samples

    def _round(self, value: Any, targets: Any, samples: Sequence[Samples]) -> None:
        """Run each block twice: its backward whole, and then in two parts."""
        for index, part in enumerate(self.parts):
            kept = Pass(0, 0, targets)
            began = _clock()
            made = part.forward(value, kept, grads=index > 0)
            forwarded = _clock()
            grads = None
            if part is not self.parts[-1]:
                grads = [
                    torch.ones_like(t) if t.requires_grad else None for t in list_tensors(made)
                ]
            ready = _clock()
            part.backward(grads, kept, "all")
            ended = _clock()
            samples[index]["forward"].append(forwarded - began)
            samples[index]["backward"].append(ended - ready)
            again = Pass(0, 0, targets)
            began = _clock()
            part.forward(value, again, grads=index > 0)
            samples[index]["recompute"].append(_clock() - began)
            if self._splits[index]:
                self._split(index, grads, again, samples[index])
            if grads is not None:
                value = make_leaves(made)

    def _split(self, index: int, grads: Any, kept: Pass, samples: Samples) -> None:
        part = self.parts[index]
        try:
            part.backward(grads, kept, "split")
            began = _clock()
            part.backward_weights(kept)
            samples["weight"].append(max(_clock() - began, 1e-9))
        except RuntimeError as error:
            self._splits[index] = False
            why = str(error).strip().splitlines()[0]
            self.notes.append(f"{self.names[index]}: its backward cannot be split: {why}")

    def _settle(
        self, index: int, size: int, samples: Samples, taken: int, stored: int
    ) -> BlockCost:
        name = self.names[index]

        def figure(kind: str) -> float:
            what = f"{kind} of block {name}, micro-batch {size}"
            found = settle(samples[kind], what)
            self._spreads.append((found.spread, what))
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
            taken = collect_tensors(value)
            saved = {_place(t): _size(t) for t in taken}
            note = functools.partial(_note, saved, known)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                made = part.forward(value, Pass(0, 0, targets), grads=index > 0)
            found.append((sum(t.nbytes for t in taken), sum(saved.values())))
            if index + 1 < len(self.parts):
                value = make_leaves(made)
        return found

    # --- state ----------------------------------------------------------------------------------

    def _measure_optimizer(
        self, optimizer: Callable[[Any], Any]
    ) -> tuple[list[tuple[int, int, int, float]], tuple[Shared, ...]]:
        """Return (parameter, gradient and optimizer bytes, update seconds) of each block.

        And the same of what blocks share. A step is measured as a whole, and shared out by the
        bytes that it touches.
        """
        params = list(dict.fromkeys(p for part in self.parts for p in part.parameters()))
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

        def weigh(mine: Sequence[Tensor]) -> tuple[int, int, int]:
            state = sum(t.nbytes for p in mine for t in collect_tensors(made.state.get(p, {})))
            gradients = sum(p.nbytes for p in mine if p.requires_grad)
            return sum(p.nbytes for p in mine), gradients, state

        def weigh_whole(mine: Sequence[Tensor]) -> tuple[int, int, int, float]:
            parameters, gradients, state = weigh(mine)
            return parameters, gradients, state, whole_s * (2 * gradients + state) / total

        _, gradients, state = weigh(params)
        total = 2 * gradients + state or 1
        shared = [
            Shared(
                blocks, *weigh_whole([p for p, those in self._shared.items() if those == blocks])
            )
            for blocks in sorted(set(self._shared.values()))
        ]
        return [weigh_whole(list(part.parameters())) for part in self.parts], tuple(shared)


def _note(saved: dict[int, int], known: set[int], tensor: Tensor) -> Tensor:
    if _place(tensor) not in known:
        saved[_place(tensor)] = _size(tensor)
    return tensor


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _size(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _clock() -> float:
    """Return the time; a GPU has done by then what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


_NOISY = 0.25


def measure_call(call: Mapping[str, Any]) -> None:
    """Measure what `train` was called with, write profile and report, and end the process."""
    request: ProfileRequest = decode(os.environ[ASK].encode(), ProfileRequest)
    try:
        report = _measure(request, SimpleNamespace(**call))
    except PerdureError as error:
        report = ProfileReport(error=error.message, hint=error.hint, exit_code=error.exit_code)
    replace_file(request.report, encode(report))
    sys.exit(report.exit_code)


def _load(script: Any, sizes: Sequence[int]) -> dict[int, tuple[Any, Any]]:
    """Return the first micro-batch of each size, on the device."""
    batches = {}
    for size in sizes:
        plan = plan_batches(script.global_batch, size)
        data = MicroBatches(
            script.dataset,
            plan,
            seed=script.seed,
            shuffle=script.shuffle,
            collate_fn=script.collate_fn,
        )
        inputs, targets = data.load(0, 0)
        batches[size] = map_tensors((inputs, targets), lambda tensor: tensor.to(script.device))
    return batches


def _measure(request: ProfileRequest, script: Any) -> ProfileReport:
    """Measure what `script`, the arguments of `train`, is made of."""
    # A program as well, which Python warns of where its package has it already.
    from perdure.worker.profiling.links import LinkFigures, measure_links

    measured = []
    between = LinkFigures((), (), 0.0, "")
    if request.meeting is not None:  # First, since the other machines wait.
        between = measure_links(request.meeting.nodes, say, request.meeting)
        measured.append("links between nodes")
    base_bytes = _measure_base_bytes(script.device)
    chain = [block.to(script.device) for block in list_blocks(make_model(script.blocks))]
    sizes = request.micro_batches or _list_sizes(script.global_batch, script.micro_batch)
    batches = _load(script, sizes)
    machine = _describe_machine(script.device)
    ties = [(blocks, tuple(p.shape)) for p, blocks in find_shared(chain).items()]
    key = _hash(*machine, *map(_describe_block, chain), *ties, _shapes(batches),
                _source(script.loss), _source(script.optimizer), request.seconds)  # fmt: skip
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)

    def take(what: str, name: str, kind: Any, measure: Callable[[], Any]) -> Any:
        """Return what was measured before, or is now."""
        path = folder / f"{what}-{name}.json"
        kept = read_kept(path, kind, request)
        if kept is None:
            kept = measure()
            replace_file(path, encode(kept))
            measured.append(what)
        return kept

    meter = BlockMeter(chain, script.loss, seconds=request.seconds, say=say)
    kept = take(
        "blocks", key, Figures, lambda: meter.measure(batches, script.optimizer, base_bytes)
    )
    name = _hash(*machine, request.ranks)
    links = take("links", name, LinkFigures, lambda: measure_links(request.ranks, say))
    profile = CostProfile(
        request.model, ", ".join(machine), kept.base_bytes, kept.blocks,
        links.transfers + between.transfers, links.all_reduces + between.all_reduces, kept.shared,
    )  # fmt: skip
    path = folder / f"{Path(request.model).stem}-{key}.json"
    replace_file(path, write_profile(profile).encode())
    spread, spread_of = max((found.spread, found.spread_of) for found in (kept, links, between))
    notes = list(kept.notes)
    if spread > _NOISY:
        notes.append(f"{spread_of}: half of its measurements lie {spread:.0%} apart")
    return ProfileReport(str(path), tuple(measured), spread, spread_of, tuple(notes))


def _list_sizes(global_batch: int, micro_batch: int) -> tuple[int, ...]:
    """Return the script's own micro-batch, its half and its double, where these cut the batch."""
    wanted = sorted({micro_batch // 2, micro_batch, 2 * micro_batch} - {0})
    return tuple(size for size in wanted if global_batch % size == 0) or (micro_batch,)


# --- what was measured before ---------------------------------------------------------------------


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def read_kept(path: Path, kind: Any, request: ProfileRequest) -> Any:
    """Return what `path` has; None where that is nothing, or nothing that can be read."""
    if request.again or not path.exists():
        return None
    try:
        return decode(path.read_bytes(), kind)
    except (OSError, ProtocolError):
        return None


def _describe_machine(device: Any) -> list[str]:
    prints = take_fingerprint(1)
    words = [prints["gpu"] if torch.device(device).type == "cuda" else prints["cpu"]]
    return [*words, f"{os.cpu_count()} cores", f"{prints['threads']} threads",
            f"torch {prints['torch']}"]  # fmt: skip


def _describe_block(block: nn.Module) -> str:
    """Return its settings, code and shapes."""
    kinds = {type(module) for module in block.modules()}
    code = sorted(_source(kind) for kind in kinds)
    shapes = [
        (n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()
    ]
    return f"{block!r} {_hash(*code)} {shapes}"


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return repr(type(thing))


def _shapes(batches: dict[int, tuple[Any, Any]]) -> list[Any]:
    return [
        (size, [(tuple(t.shape), str(t.dtype)) for t in collect_tensors(list(batch))])
        for size, batch in sorted(batches.items())
    ]


# --- the machine ----------------------------------------------------------------------------------


def _measure_base_bytes(device: Any) -> int:
    """Return what a process takes before any block is on its device, bytes."""
    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
