"""Whether all members that hold the same state hold the same bytes.

Every member prints the same mean of losses, so the loss cannot show that states differ. Each member
hashes its state in the first two steps of every world, every `EVERY` steps, before a checkpoint is
made, and at the end. The second step of a world shows an update that was not alike. If all members
have met in a comparison before, the first step is left out, because a recovery would wait for it.
A thread hashes while the step computes, which alters nothing of the state. Members exchange the
hashes through the world's store before they apply the step.

A unit is what some members have alike, such as the rows of a shard or a block of a stage. If hashes
of a unit differ, its holders tell the hash of each tensor, and every member raises the same error.
A later start goes on from a checkpoint, which all members agreed on.

Processors of different kinds may round the last bit of an update differently. So only members of
one kind are compared. Each world reports once that kinds differ.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
import xxhash
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import DifferError, PlatformError
from perdure.worker.checkpoint.attributes import NotPlainError, hash_plain
from perdure.worker.elastic.apart import Broken, start
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving import hash_tensors
from perdure.worker.system.stderr import say

EVERY = 100
"""Steps between two comparisons: 516 MB hash in 40 ms."""
_LOOK_S = 0.005
_KIND = "kind"
"""Key of the member's kind of processor. Units begin with no such word."""

NAMED = "attributes"
"""A unit that begins like this has hashes of attributes that may differ. The output names them.

A rank's number is its own, and an evaluation on one rank may have left something in the model.
"""

Units = Mapping[str, Any]
"""Name of a unit -> nested dicts and lists of tensors and plain values."""
Hashes = dict[str, dict[str, str]]
"""Unit -> path within it -> hash."""


class Comparison:
    """One member's part in comparing the states of a world."""

    def __init__(self, list_units: Callable[[], Units]) -> None:
        """Compare what `list_units` returns; its tensors stand still until a step is applied."""
        self._list_units = list_units
        self._hashing: Future[Hashes] | None = None
        self._first = self._compared = -1
        """The first step of this world, and the newest whose state was compared in it."""
        self._met, self._all_met = frozenset[int](), False
        """The members that have stayed since a comparison of all of them, and whether each has."""
        self._told = set[str]()
        """What this world has reported: that kinds of processors differ, or attributes of a unit.
        """

    def has_met(self, members: Sequence[int]) -> bool:
        """Return whether this member has compared its state with all of `members` already."""
        return self._met.issuperset(members)

    def enter(self, members: Sequence[int], *, met: bool) -> None:
        """Enter the world of `members`; `met` says whether each of them has met all others."""
        self._met, self._all_met = self._met.intersection(members), met
        self._hashing, self._first, self._compared, self._told = None, -1, -1, set()

    def begin(self, step: int, group: Group) -> None:
        """Begin to hash the state of `step`, if this world is to compare it."""
        if self._first == -1:
            self._first = step
        due = self._all_met <= step - self._first <= 1 or step % EVERY == 0
        if len(group.members) > 1 and due and self._compared != step:
            self._hashing = self._start()

    def finish(self, step: int, group: Group, *, wanted: bool = False) -> None:
        """Compare the state of `step` if that was begun, or is `wanted`. All members come here.

        Raises:
            Broken: a newer epoch was ordered first.
            PlatformError: members differ.
        """
        hashing, self._hashing = self._hashing, None
        if len(group.members) == 1 or self._compared == step or not (hashing or wanted):
            return
        hashing = hashing or self._start()
        while not wait([hashing], _LOOK_S).done:
            if group.overtaken():
                raise Broken("a newer epoch was ordered")
        found = compare(hashing.result(), step, group)
        for unit in found.keys() - self._told:
            say(found[unit])
        self._told |= found.keys()
        self._compared, self._met = step, frozenset(group.members)

    def _start(self) -> Future[Hashes]:
        leaves = {unit: list(_list_leaves(value)) for unit, value in self._list_units().items()}
        return start(lambda: hash_leaves(leaves), "perdure-compare")


def compare(mine: Hashes, step: int, group: Group) -> dict[str, str]:
    """Compare the hashes of all members of `group`.

    If more than half of the members of one kind agree, the others are wrong. Otherwise, none is
    known to be.

    Return what this member has to say, by unit: attributes that differ, or "kind": that members of
    different kinds differ.

    Raises:
        Broken: a newer epoch was ordered first.
        PlatformError: members of one kind differ. It is a `DifferError` unless this one is wrong.
    """
    store, me = group.store, group.me
    sums = {
        unit: xxhash.xxh3_64_hexdigest(encode(dict(sorted(found.items()))))
        for unit, found in mine.items()
    }
    store.set(f"state/{step}/{me}", encode(sums | {_KIND: describe_processor()}))
    told = _read(group, [f"state/{step}/{member}" for member in group.members])
    kinds = {member: one.pop(_KIND, "") for member, one in told.items()}
    said: dict[str, str] = {}
    for unit in sorted({unit for one in told.values() for unit in one}):
        of = {member: one[unit] for member, one in told.items() if unit in one}
        if len(set(of.values())) == 1:
            continue
        alike = [{m: one for m, one in of.items() if kinds[m] == kind} for kind in kinds.values()]
        wrong = next((ones for ones in alike if len(set(ones.values())) > 1), None)
        odd, other = find_odd(wrong or of)
        named = unit.startswith(NAMED)
        if wrong is None:
            if me == other and not named:
                said[_KIND] = (
                    f"elastic: rank {odd} ({kinds[odd]}) and rank {other} ({kinds[other]}) round "
                    f"differently: their states differ before step {step}"
                )
            continue
        if me in (odd, other):
            store.set(f"state/{step}/{me}/{unit}", encode(mine[unit]))
        found = _read(group, [f"state/{step}/{member}/{unit}" for member in (odd, other)])
        if named:
            if me == other and (names := find_apart(found[odd], found[other])):
                said[unit] = describe_apart(names, odd, me)
            continue
        what = find_first(found[odd], found[other])
        store.set(f"state/{step}/{me}/told", "")
        with contextlib.suppress(
            Broken, RuntimeError
        ):  # Every member has seen it, and none goes on.
            group.read([f"state/{step}/{member}/told" for member in group.members])
        most = wrong[other]
        known = 2 * list(wrong.values()).count(most) > len(wrong)
        apart = f"rank {other} and rank {odd} do not have the same {what}"
        if known:
            apart = f"{what} of rank {odd} is not that of rank {other}"
        raise (PlatformError if known and wrong.get(me, most) != most else DifferError)(
            f"elastic: members differ before step {step}: {apart}",
            hint="on_step may only read the state: alter it in after_update=; all members go on "
            "from the newest checkpoint, on which they agreed",
        )
    return said


def describe_processor() -> str:
    """Return what the last bit of an update may depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return ", ".join(filter(None, (device, capability, f"{threads} threads", torch.__version__)))


def _read(group: Group, keys: list[str]) -> dict[int, dict[str, str]]:
    values = group.read(keys)
    return {
        int(key.split("/")[2]): decode(value, dict[str, str])
        for key, value in zip(keys, values, strict=True)
    }


def find_odd(told: Mapping[int, str]) -> tuple[int, int]:
    """Return a member that differs from most, and the first of those that it differs from."""
    hashes = list(told.values())
    most = max(hashes, key=hashes.count)  # In doubt, the first member's.
    return next(m for m, one in told.items() if one != most), next(
        m for m, one in told.items() if one == most
    )


def find_first(mine: Mapping[str, str], its: Mapping[str, str]) -> str:
    """Return the first path whose hashes differ, or that only one of the two has."""
    return next(path for path in [*its, *mine] if mine.get(path) != its.get(path))


def find_apart(mine: Mapping[str, str], its: Mapping[str, str]) -> list[str]:
    """Return the paths that both have, and whose hashes differ."""
    return [path for path in mine if its.get(path, mine[path]) != mine[path]]


def describe_apart(names: list[str], odd: int, me: int) -> str:
    """Return what rank `me` says of attributes that differ from those of rank `odd`."""
    return (
        f"elastic: members do not have {', '.join(names[:3])} in common (of rank {odd}, and of "
        f"rank {me}). If a pass uses it, the script has to give it the same value on every rank"
    )


def hash_attributes(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a hash of each attribute, as it is before the passes of the step."""
    return {f"{p}.{name}": hash_state(v) for p, one in found.items() for name, v in one.items()}


def hash_state(value: Any) -> str:
    """Return a hash of nested dicts and lists of tensors and plain values."""
    return xxhash.xxh3_64_hexdigest(repr([(p, _hash(v)) for p, v in _list_leaves(value)]).encode())


def hash_leaves(leaves: Mapping[str, list[tuple[str, Any]]]) -> Hashes:
    """Return the hash of each leaf, by unit and path."""
    return {unit: {path: _hash(value) for path, value in found} for unit, found in leaves.items()}


def _list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    else:
        yield path, value
        return
    for key, one in inner:
        yield from _list_leaves(one, f"{path}.{key}" if path else str(key))


def _hash(value: Any) -> str:
    """Return the hash of a tensor with its type and shape, or a plain value as text.

    Another object counts by its type: nothing else of it is the same in every process.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return str(value.layout)
        return f"{value.dtype} {list(value.shape)} {hash_tensors([value])}"
    if isinstance(value, bool | str | bytes | None):
        return repr(value)
    if isinstance(value, int | float):
        return repr(float(value))
    with contextlib.suppress(NotPlainError):
        return hash_plain(value, places=False).hex()
    return type(value).__name__
