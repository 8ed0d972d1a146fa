"""`perdure profile`: a script's own call of `perdure.elastic.train` measures instead of training.

What was measured is kept under a fingerprint of all that it depends on: of the model its blocks,
their code, shapes and settings; of the machine its processor, torch and threads. The links'
figures are kept by themselves, for they are the same for every model.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perdure.files import replace_file
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError, ProtocolError
from perdure.model.planning.costs import (
    ASK,
    CostProfile,
    ProfileReport,
    ProfileRequest,
    write_profile,
)
from perdure.plan.elastic.microbatches import plan_batches
from perdure.worker.elastic import list_blocks
from perdure.worker.elastic.moving import map_tensors
from perdure.worker.elastic.samples import MicroBatches
from perdure.worker.elastic.state.replicated import make_model
from perdure.worker.profiling.blocks import BlockMeter, Figures, find_tensors
from perdure.worker.profiling.links import LinkFigures, measure_links
from perdure.worker.rng import take_fingerprint

_NOISY = 0.25


def find_request() -> ProfileRequest:
    """Return what `perdure profile` asks this process for."""
    return decode(os.environ[ASK].encode(), ProfileRequest)


def measure_script(request: ProfileRequest, script: "Script") -> None:
    """Measure what `script` would train, write profile and report, and end the process."""
    try:
        report = _measure(request, script)
    except PerdureError as error:
        report = ProfileReport(error=error.message, hint=error.hint, exit_code=error.exit_code)
    replace_file(request.report, encode(report))
    sys.exit(report.exit_code)


@dataclass(frozen=True)
class Script:
    """What a script has given to `perdure.elastic.train`."""

    blocks: Any
    optimizer: Callable[[Any], Any]
    dataset: Any
    loss: Callable[[Any, Any], Any]
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool
    device: Any
    collate_fn: Any

    def load(self, sizes: Sequence[int]) -> dict[int, tuple[Any, Any]]:
        """Return the first micro-batch of each size, on the device."""
        batches = {}
        for size in sizes:
            plan = plan_batches(self.global_batch, size)
            data = MicroBatches(
                self.dataset, plan, seed=self.seed, shuffle=self.shuffle, collate_fn=self.collate_fn
            )
            inputs, targets = data.load(0, 0)
            batches[size] = map_tensors((inputs, targets), lambda tensor: tensor.to(self.device))
        return batches


def _measure(request: ProfileRequest, script: Script) -> ProfileReport:
    base_bytes = _find_base(script.device)
    chain = [block.to(script.device) for block in list_blocks(make_model(script.blocks))]
    sizes = request.micro_batches or _list_sizes(script.global_batch, script.micro_batch)
    batches = script.load(sizes)
    machine = _describe_machine(script.device)
    key = _hash(*machine, *map(_describe_block, chain), _shapes(batches),
                _source(script.loss), _source(script.optimizer), request.seconds)  # fmt: skip
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    measured = []
    kept_at = folder / f"blocks-{key}.json"
    kept = read_kept(kept_at, Figures, request)
    if kept is None:
        meter = BlockMeter(chain, script.loss, seconds=request.seconds, say=_say)
        kept = meter.measure(batches, script.optimizer, base_bytes)
        replace_file(kept_at, encode(kept))
        measured.append("blocks")
    links_at = folder / f"links-{_hash(*machine, request.ranks)}.json"
    links = read_kept(links_at, LinkFigures, request)
    if links is None:
        links = measure_links(request.ranks, _say)
        replace_file(links_at, encode(links))
        measured.append("links")
    profile = CostProfile(
        request.model, ", ".join(machine), kept.base_bytes, kept.blocks,
        links.transfers, links.all_reduces,
    )  # fmt: skip
    path = folder / f"{Path(request.model).stem}-{key}.json"
    replace_file(path, write_profile(profile).encode())
    spread, spread_of = max((kept.spread, kept.spread_of), (links.spread, links.spread_of))
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
        (size, [(tuple(t.shape), str(t.dtype)) for t in find_tensors(list(batch))])
        for size, batch in sorted(batches.items())
    ]


# --- the machine ----------------------------------------------------------------------------------


def _find_base(device: Any) -> int:
    """Return what a process takes before any block is on its device, bytes."""
    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _say(text: str) -> None:
    print(f"perdure: {text}", file=sys.stderr, flush=True)
