"""The state of a pipelined model: of some blocks, with their optimizer's state, and a schedule.

State is kept and moved by block: its parameters, its buffers, and what the optimizer has for each
of its parameters. What is left (learning rates, the schedule) is small and the same on every
member: the *plain* part. The model keeps all of its blocks; those of other members are empty.
The optimizer is made anew for other blocks, and given back what it had for each parameter.

A parameter that several blocks share (an embedding that is the head's weight too) is in the state
of each of them. A member has it once, however many of these blocks it has, and members whose
blocks share it keep it equal: its gradients are summed over all of them, so that all make the same
update. Its *home* is the first block that has it, and its name there.

In a checkpoint the first copy of each stage saves its blocks, by their names (`StageRegistry`), and
what is shared where its home is. It does not know of stages: it is read into any layout, by each
member what it needs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.plan.elastic.stages import Runs, Section, list_blocks
from perdure.worker.checkpoint.attributes import note_attributes, read_changed, read_common
from perdure.worker.checkpoint.registry import Registry
from perdure.worker.elastic.moving import PARAMETER, find_device
from perdure.worker.elastic.state import (
    load_plain,
    load_settings,
    name_modules,
    read_flags,
    read_settings,
)
from perdure.worker.elastic.state.replicated import (
    AfterUpdate,
    BufferGuard,
    describe_groups,
    drop_harmless,
    list_trained,
    refuse_loose,
    refuse_regrouped,
    run_after_update,
)

BlockState = dict[str, dict[str, Any]]
"""Name of a parameter or buffer -> key -> tensor or number; `PARAMETER` is the value itself."""


class StagedReplica:
    """A list of blocks, of which this member has those of its sections."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float = 0.0,
        after_update: AfterUpdate | None = None,
    ) -> None:
        """Train `blocks`, called in order; `adopt` says which of them are this member's.

        Raises:
            ConfigError: two blocks have different parameters over the same memory.
        """
        self.blocks = list(blocks)
        self.model = nn.Sequential(*blocks)
        refuse_views(self.blocks)
        self.shared = find_shared(self.blocks)
        """Parameter -> the blocks that have it, where these are several."""
        self.homes: dict[tuple[int, str], tuple[int, str]] = {}
        """(block, name) of what it shares with a block before it -> the first such, its name."""
        first: dict[Tensor, tuple[int, str]] = {}
        for number, block in enumerate(self.blocks):
            for name, parameter in block.named_parameters(remove_duplicate=False):
                home = first.setdefault(parameter, (number, name))
                if home[0] != number:
                    self.homes[number, name] = home
        trained = self.trained(range(len(self.blocks)))
        self.places = {parameter: place for place, parameter in enumerate(trained)}
        """Trained parameter -> its place among all of the model's."""
        self.clip_norm, self._after_update = clip_norm, after_update
        self.names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        self.trained_first = list_trained(self.model)
        self.norm = 0.0
        """The norm of all blocks' gradients, by which the next update is clipped."""
        self.runs: Runs = (Section(0, len(self.blocks)),)
        self._modules = name_modules(self.model)
        self._born = note_attributes(self._modules)
        self._initial = read_changed(self._modules, {})
        """All attributes, as the script gave them."""
        self._groups: dict[str, Any] = {}
        """The optimizer's settings for each parameter, when it has the whole model."""
        self.guard = BufferGuard(self.model)
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.device = find_device(self.model)
        self._anchor = nn.Parameter(torch.zeros(1, device=self.device))
        """Has no gradient: a stage without parameters has settings and a schedule too."""
        self.shapes = [{n: t.shape for n, t in _list_tensors(b).items()} for b in self.blocks]
        self.sizes = tuple(_count_bytes(block) for block in self.blocks)
        self.weights = tuple(
            1.0 + sum(p.numel() for p in block.parameters()) for block in self.blocks
        )
        self._make()

    @property
    def nbytes(self) -> int:
        """Return about what the whole state has."""
        return sum(self.sizes)

    @property
    def held(self) -> object:
        """Return the runs of blocks that this member has."""
        return self.runs

    @property
    def mine(self) -> list[int]:
        """Return the numbers of this member's blocks."""
        return list_blocks(self.runs)

    @property
    def parameters(self) -> list[Tensor]:
        """Return what is trained of this member's blocks."""
        return self.trained(self.mine)

    def trained(self, blocks: Iterable[int]) -> list[Tensor]:
        """Return the parameters of `blocks` that are trained, each once."""
        found = (p for b in blocks for p in self.blocks[b].parameters() if p.requires_grad)
        return list(dict.fromkeys(found))

    # --- the state ----------------------------------------------------------------------------

    def state_of(self, block: int) -> BlockState:
        """Return the state of a block that this member has; tensors are not copied."""
        state: BlockState = {
            name: {PARAMETER: tensor.detach()}
            for name, tensor in _list_tensors(self.blocks[block]).items()
        }
        for name, parameter in self.blocks[block].named_parameters():
            state[name] |= self.optimizer.state.get(parameter, {})
        return state

    def list_attributes(self, kinds: tuple[type, ...] = (float,)) -> dict[str, dict[str, Any]]:
        """Return the attributes that every member has alike, and all values of `kinds`."""
        return drop_harmless(read_common(self._modules, self._born, kinds), self.guard.harmless)

    def plain(self, kinds: tuple[type, ...] = (float,)) -> dict[str, Any]:
        """Return what every member has alike, and all attributes of `kinds`."""
        return read_settings(self.optimizer, self.scheduler) | {
            "attributes": self.list_attributes(kinds),
            **read_flags(self.model),
        }

    def state(self) -> dict[str, Any]:
        """Return all that a member with the same blocks has; tensors are not copied."""
        return {
            "runs": [list(run) for run in self.runs],
            "blocks": {b: self.state_of(b) for b in self.mine},
            "plain": self.plain(),
            "harmless": sorted(self.guard.harmless),
        }

    def adopt(
        self, runs: Runs, states: Mapping[int, BlockState], plain: dict[str, Any] | None
    ) -> None:
        """Become `runs`: blocks of `states` are taken, the others are there already.

        With `plain`, settings and schedule are taken too.
        """
        before = {} if plain is not None else self.plain()
        entries: dict[Tensor, Any] = {
            parameter: self.optimizer.state[parameter]
            for block in list_blocks(runs)
            for parameter in self.blocks[block].parameters()
            if parameter in self.optimizer.state
        }
        for block, state in states.items():
            tensors = _list_tensors(self.blocks[block])
            for name, values in state.items():
                tensors[name].data = values[PARAMETER].to(self.device)
            for name, parameter in self.blocks[block].named_parameters():
                entries.pop(parameter, None)
                mine = {k: v for k, v in state[name].items() if k != PARAMETER}
                if mine:
                    entries[parameter] = mine
        kept = {t for b in list_blocks(runs) for t in _list_tensors(self.blocks[b]).values()}
        for block in set(range(len(self.blocks))) - set(list_blocks(runs)):
            for tensor in set(_list_tensors(self.blocks[block]).values()) - kept:
                tensor.grad = None
                tensor.data = tensor.data.new_empty(0)
        self.runs = runs
        self._make()
        load_settings(self.optimizer, self.scheduler, plain if plain is not None else before)
        if plain is not None:  # What later steps have changed, and this one had not, is undone.
            load_plain(self.model, {"attributes": self._initial})
            load_plain(self.model, plain)
        self.optimizer.state.update(entries)

    def _make(self) -> None:
        self.optimizer = self._make_optimizer([*self.parameters, self._anchor])
        refuse_loose(self.optimizer, {*self.names, self._anchor})
        groups = describe_groups(self.optimizer, self.names)
        self._groups = self._groups or groups
        refuse_regrouped(self._groups, groups)
        self.scheduler = self._make_scheduler(self.optimizer) if self._make_scheduler else None
        harmless = self.guard.harmless
        self.guard = BufferGuard(self.model)
        self.guard.harmless |= harmless

    # --- a step -------------------------------------------------------------------------------

    def update(self) -> None:
        """Apply the gradients that its parameters have."""
        if self.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, torch.tensor(self.norm))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        run_after_update(self._after_update, self.model)


def find_shared(blocks: Sequence[nn.Module]) -> dict[Tensor, tuple[int, ...]]:
    """Return the parameters that several of `blocks` have, each with their numbers."""
    having: dict[Tensor, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            having.setdefault(parameter, []).append(number)
    return {parameter: tuple(those) for parameter, those in having.items() if len(those) > 1}


def compute_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each gradient."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(list(gradients))])


def _list_tensors(block: nn.Module) -> dict[str, Tensor]:
    state = block.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _count_bytes(block: nn.Module) -> int:
    """Return about what a block's state has, with the two moments of Adam."""
    moments = 2 * sum(p.nbytes for p in block.parameters() if p.requires_grad)
    return moments + sum(t.nbytes for t in _list_tensors(block).values())


def refuse_views(blocks: Sequence[nn.Module]) -> None:
    """Refuse what is one memory and not one parameter: an update of one is not one of the other."""
    spans: dict[tuple[torch.device, int], list[_Span]] = {}
    for number, block in enumerate(blocks):
        for name, tensor in block.named_parameters():
            if type(tensor) is not nn.Parameter or not tensor.numel():
                continue  # What is a tensor of another kind need not lie in a memory.
            memory = tensor.device, tensor.untyped_storage().data_ptr()
            if memory[1]:
                spans.setdefault(memory, []).append(_span(number, f"{number}.{name}", tensor))
    for found in spans.values():
        for at, one in enumerate(found):
            for other in found[:at]:
                if one.tensor is not other.tensor and max(one.first, other.first) < min(
                    one.stop, other.stop
                ):
                    raise ConfigError(
                        f"elastic: the parameters {other.name} and {one.name} are views of one "
                        "memory, which ranks that are sent them would not have",
                        hint="share the parameter itself (b.weight = a.weight), or copy it",
                    )


class _Span(NamedTuple):
    """Where a parameter lies in its memory, bytes."""

    first: int
    stop: int
    block: int
    name: str
    tensor: Tensor


def _span(block: int, name: str, tensor: Tensor) -> _Span:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first, last = int(tensor.storage_offset()), sum((int(n) - 1) * int(s) for n, s in steps)
    size = tensor.itemsize
    return _Span(first * size, (first + last + 1) * size, block, name, tensor)


_SEPARATOR = "/"
"""Between a parameter's name and the key of its optimizer's state."""


class StageRegistry(Registry):
    """What a member has of a pipelined state."""

    def __init__(self, replica: StagedReplica, number: int, count: int) -> None:
        """Save and restore `replica`, which has stage `number` of `count`."""
        super().__init__(number, count)
        self._replica = replica
        self._targets: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of its blocks."""
        return {path: value for path, value in self._list() if isinstance(value, Tensor)}

    def _list(self) -> Iterator[tuple[str, Any]]:
        """Yield all of its blocks' state, by paths that no other block has."""
        for block in self._replica.mine:
            for name, values in self._replica.state_of(block).items():
                if (block, name) not in self._replica.homes:
                    for key, value in values.items():
                        yield f"{block}.{name}{_SEPARATOR}{key}", value

    def own(self) -> dict[str, Any]:
        """Return the rest of its state, and what the tensors are."""
        kinds = {key: (list(t.shape), t.dtype) for key, t in self.tensors().items()}
        numbers: dict[str, dict[str, Any]] = {}
        for path, value in self._list():
            name, _, key = path.rpartition(_SEPARATOR)
            entries = numbers.setdefault(name, {})
            if not isinstance(value, Tensor):
                entries[key] = value
        plain = self._replica.plain(())  # A number that is edited between two runs is the script's.
        return {"stage": {"numbers": numbers, "kinds": kinds}, "plain": plain}

    def list_own(self, folder: Path) -> list[Path]:
        """Return the files of all stages."""
        return sorted(folder.glob("rank-*.pt"), key=lambda p: int(re.sub(r"\D", "", p.stem)))

    def merge(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the first stage's file, with what all of them say of their blocks."""
        stages = [one["stage"] for one in found]
        stage = {what: {k: v for s in stages for k, v in s[what].items()} for what in stages[0]}
        return {**found[0], "stage": stage}

    def replay(self, own: dict[str, Any]) -> list[str]:
        """Return nothing: no buckets are in an order of their own."""
        return []

    def targets(self, own: dict[str, Any], only: str = "") -> dict[str, Tensor]:
        """Return tensors for what this member needs of a checkpoint.

        Raises:
            KeyError: it has a block less.
            ValueError: it is of another model.
        """
        replica, kinds = self._replica, own["stage"]["kinds"]
        mine = {(block, name) for block in replica.mine for name in replica.shapes[block]}
        for block, name in mine & replica.homes.keys():
            if f"{block}.{name}{_SEPARATOR}" in kinds:
                raise ValueError(f"{block}.{name} is shared with another block, and was not then")
        homes = {_name(*replica.homes.get(one, one)) for one in mine}
        self._targets = {
            key: torch.empty(shape, dtype=dtype)
            for key, (shape, dtype) in kinds.items()
            if int(key.partition(".")[0]) in replica.mine or key.rpartition(_SEPARATOR)[0] in homes
        }
        for block, name in mine:
            its = f"{_name(*replica.homes.get((block, name), (block, name)))}{_SEPARATOR}"
            if self._targets[its].shape != replica.shapes[block][name]:
                raise ValueError(f"block {block}: {name} has another shape")
        return self._targets

    def list_left(self, own: dict[str, Any]) -> list[str]:
        """Return nothing: a stage has no objects with names."""
        return []

    def load_own(self, own: dict[str, Any], only: str = "") -> list[str]:
        """Become what was read."""
        replica, numbers = self._replica, own["stage"]["numbers"]
        found: dict[str, dict[str, Any]] = {}
        for path, tensor in self._targets.items():
            name, _, key = path.rpartition(_SEPARATOR)
            found.setdefault(name, dict(numbers.get(name, {})))[key] = tensor
        self._targets = {}
        mine = {(block, name) for block in replica.mine for name in replica.shapes[block]}
        states: dict[int, BlockState] = {block: {} for block in replica.mine}
        for path, state in found.items():
            block, _, name = path.partition(".")
            if int(block) in states:
                states[int(block)][name] = state
        for (number, name), home in replica.homes.items():
            if (number, name) in mine:
                states[number][name] = found[_name(*home)]
        replica.adopt(replica.runs, states, own["plain"])
        return []


def _name(block: int, name: str) -> str:
    return f"{block}.{name}"
