"""What a model costs on a machine: times and bytes of its blocks, costs of links between devices.

Nothing here is estimated: a measure that is not in the profile is an error that names it, never
a zero. A file is JSON, versioned; `docs/planning.md` shows one.
"""

from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from perdure.model.codec import encode
from perdure.model.errors import MeasureError
from perdure.model.input.source import Source

VERSION = 1
HINT = "docs/planning.md shows a cost profile"

Place = Literal["node", "cluster"]
"""Where two devices, or a group of them, are: all in one node, or in several."""

PLACES: dict[Place, str] = {"node": "within a node", "cluster": "across nodes"}

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class BlockCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block with one micro-batch, on one device."""

    forward_s: Positive
    backward_s: Seconds
    """All of it: gradients of the input and of the weights."""
    recompute_s: Seconds
    """The second forward where activations are not stored."""
    input_bytes: Bytes
    """What it takes from the block before it; as much gradient goes back there. All that is kept
    of the block where it recomputes."""
    stored_bytes: Bytes
    """All that its forward leaves for its backward, its input among it."""
    weight_s: Seconds | None = None
    """The part of `backward_s` that yields only gradients of weights: zero-bubble schedules need
    it."""


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block of the model: the smallest piece that a stage may begin or end with."""

    name: str
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    """What is reduced over the replicas, once a step."""
    optimizer_bytes: Bytes
    update_s: Seconds
    """Its share of an optimizer's step."""
    costs: dict[int, BlockCost]
    """By micro-batch size, samples."""

    @property
    def state_bytes(self) -> int:
        """What a device holds for it whatever is in flight."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that several blocks have in common, as an embedding and its head may.

    Each of these blocks counts them in full. A device that has several of the blocks has them once;
    over all devices that have one, their gradients are summed once a step, after all others.
    """

    blocks: tuple[int, ...]
    """Places among the profile's blocks, rising."""
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    update_s: Seconds

    @property
    def state_bytes(self) -> int:
        """What a device holds of them whatever is in flight."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message from one device to another."""

    place: Place
    latency_s: Seconds
    bytes_per_s: Positive


class AllReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum over a group of devices, of `bytes` on each: latency_s + bytes / bytes_per_s."""

    place: Place
    group_size: Annotated[int, msgspec.Meta(ge=2)]
    latency_s: Seconds
    bytes_per_s: Positive


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a plan is made from, but for the devices that there are."""

    model: str
    machine: str
    base_bytes: Bytes
    """What a device needs before any block is on it: context, libraries, buffers."""
    blocks: tuple[Block, ...]
    transfers: tuple[Transfer, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    shared: tuple[Shared, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sizes that were measured; the same for all blocks."""
        return tuple(sorted(self.blocks[0].costs))

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change with any of its figures."""
        text = encode(self)
        if not self.shared:  # As it was before there was such a field.
            text = text.replace(b',"shared":[]', b"")
        return sha256(text).hexdigest()[:16]

    def estimate_transfer(self, place: Place) -> Transfer:
        """Return what a message costs there.

        Raises:
            MeasureError: It was not measured.
        """
        for transfer in self.transfers:
            if transfer.place == place:
                return transfer
        raise MeasureError(f"no transfer {PLACES[place]} in the cost profile", hint=HINT)

    def estimate_all_reduce(self, place: Place, group_size: int) -> AllReduce:
        """Return what a sum over `group_size` devices costs there.

        Between two sizes that were measured the cost is interpolated. Beyond the largest it grows
        as a ring's does: 2(n-1) messages, and 2(n-1)/n of the bytes over every link. Source:
        P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69(2), 2009.

        Raises:
            MeasureError: Neither this size nor one below it was measured.
        """
        known = sorted(
            (a for a in self.all_reduces if a.place == place), key=lambda a: a.group_size
        )
        for cost in known:
            if cost.group_size == group_size:
                return cost
        for low, high in pairwise(known):
            if low.group_size < group_size < high.group_size:
                share = (group_size - low.group_size) / (high.group_size - low.group_size)
                inverse = (1 - share) / low.bytes_per_s + share / high.bytes_per_s
                latency_s = (1 - share) * low.latency_s + share * high.latency_s
                return AllReduce(place, group_size, latency_s, 1 / inverse)
        if not known or group_size < known[0].group_size:
            raise MeasureError(
                f"no all-reduce over {group_size} devices {PLACES[place]} in the cost profile",
                hint=HINT,
            )
        last = known[-1]
        hops = (group_size - 1) / (last.group_size - 1)
        volume = hops * last.group_size / group_size
        return AllReduce(place, group_size, last.latency_s * hops, last.bytes_per_s / volume)

    def is_extrapolated(self, place: Place, group_size: int) -> bool:
        """Return whether groups so large were not measured, and are taken for a ring."""
        return all(a.group_size < group_size for a in self.all_reduces if a.place == place)


class _Document(CostProfile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    perdure_profile: int


def read_profile(text: str, name: str) -> CostProfile:
    """Return the profile in `text`, called `name` in errors.

    Raises:
        ConfigError: It is malformed; names line and column, and what was expected.
    """
    source = Source(name, text, HINT)
    document: _Document = source.decode(_Document)
    if document.perdure_profile != VERSION:
        source.fail_in(["perdure_profile"], f"expected version {VERSION}")
    if not document.blocks:
        source.fail_in(["blocks"], "expected at least one block")
    sizes = set(document.blocks[0].costs)
    seen: set[str] = set()
    for at, block in enumerate(document.blocks):
        if block.name in seen:
            source.fail_in(["blocks", at, "name"], f"expected each name once, got {block.name}")
        seen.add(block.name)
        if not sizes or min(sizes) < 1 or set(block.costs) != sizes:
            wanted = ", ".join(map(str, sorted(sizes))) or "one at least"
            source.fail_in(
                ["blocks", at, "costs"],
                f"expected {block.name} measured with the micro-batches of all blocks ({wanted})",
            )
        for size, cost in block.costs.items():
            if cost.weight_s is not None and cost.weight_s > cost.backward_s:
                path: list[str | int] = ["blocks", at, "costs", str(size), "weight_s"]
                source.fail_in(path, f"expected a part of backward_s, {cost.backward_s:g} s")
    for at, shared in enumerate(document.shared):
        if (
            len(shared.blocks) < 2
            or list(shared.blocks) != sorted(set(shared.blocks))
            or not 0 <= shared.blocks[0] <= shared.blocks[-1] < len(document.blocks)
        ):
            source.fail_in(
                ["shared", at, "blocks"], "expected places of two blocks or more, rising"
            )
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_s"):
            having = min(getattr(document.blocks[b], name) for b in shared.blocks)
            if getattr(shared, name) > having:
                source.fail_in(["shared", at, name], f"expected what each block has, {having:g}")
    return msgspec.convert(document, CostProfile, from_attributes=True)


def write_profile(profile: CostProfile) -> str:
    """Return the file that `read_profile` reads."""
    document = {"perdure_profile": VERSION, **msgspec.to_builtins(profile, str_keys=True)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


ASK = "PERDURE_PROFILE"
"""Environment variable with a `ProfileRequest`: `perdure.elastic.train` measures, and ends."""


LINKS = "perdure.worker.profiling.links"
"""The program of a process that measures links."""


class Meeting(msgspec.Struct, frozen=True):
    """Where one process of each of several machines meets the others."""

    nodes: int
    address: str
    """Of the first machine, as the others reach it."""
    port: int
    interface: str
    """Name of this machine's interface, whose figures are measured."""
    wait_s: float
    """How long they wait for one another."""


class ProfileRequest(msgspec.Struct, frozen=True):
    """What to measure."""

    folder: str
    """Where profiles are kept."""
    report: str
    """File for the `ProfileReport`."""
    model: str
    """What to call it."""
    micro_batches: tuple[int, ...] = ()
    """Sizes, samples; none: the script's own, its half and its double."""
    ranks: int = 8
    """Devices of the largest group whose all-reduce is measured."""
    seconds: float = 2.0
    """Seconds for each micro-batch size, at least."""
    again: bool = False
    """Measure also what was measured before."""
    meeting: Meeting | None = None
    """With which other machines the links between nodes are measured."""


class ProfileReport(msgspec.Struct, frozen=True):
    """What was found."""

    path: str = ""
    """The cost profile's."""
    measured: tuple[str, ...] = ()
    """What was measured for it (`blocks`, `links`, `links between nodes`); the rest was kept."""
    spread: float = 0.0
    """Half of the measurements of a figure lie within this share of it: the worst figure's."""
    spread_of: str = ""
    """Which figure that is."""
    notes: tuple[str, ...] = ()
    error: str = ""
    """Why there is no profile."""
    hint: str = ""
    exit_code: int = 0
