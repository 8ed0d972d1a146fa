"""Curves of `run.log` that take a bounded room however long a job runs: coarser with age.

The newest values of a curve are kept one by one. When there are `capacity` of them, the older half
is joined in pairs to buckets of two; when there are `capacity` of these, their older half to
buckets of four, and so on (the levels of an exponential histogram: Datar, Gionis, Indyk, Motwani,
"Maintaining stream statistics over sliding windows", 2002). So a bucket is never longer than about
two parts in `capacity` of its age, and n values take some capacity * log2(n / capacity) buckets.

A bucket has count, mean, minimum, maximum and the newest value. A step that is logged again after a
restart takes the place of its older value as long as that is kept singly; in a bucket both count.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError

CAPACITY = 4096
"""Buckets of one level of one curve."""
CAPACITY_MIN = 8
BUCKETS_MAX = 200_000
"""Of all curves together, 64 bytes each; with more, each has fewer at each level."""
NAMES_MAX = 1024
"""Curves; the values of more are counted as dropped."""
_WIDTH = 8
_SOURCES_MAX = 64
_OTHERS = "others"
UNREADABLE = "curves"
"""The source that lines and files of curves are counted under which nobody can read."""
_CHECK_EVERY = 4096
"""Values between two looks at the room that all curves take."""
_Level: TypeAlias = "array[float]"
"""Buckets side by side, oldest first."""


class Bucket(NamedTuple):
    """What was logged under one name in some steps, one after the other."""

    first_step: float
    step: float
    """The newest of them."""
    at_s: float
    """When that was logged, in job time."""
    values: float
    """How many."""
    mean: float
    low: float
    high: float
    last: float
    """The value of the newest step."""


class DroppedCount(msgspec.Struct):
    """Values of one source of metrics that nobody has."""

    count: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class _Header(msgspec.Struct, frozen=True):
    """What stands before the buckets in a file."""

    capacity: int
    levels: dict[str, tuple[int, ...]]
    """Name of a curve -> the buckets of each level, the newest level first."""
    dropped: dict[str, DroppedCount] = {}
    version: int = 1


class Curve:
    """The buckets of one name."""

    __slots__ = ("levels",)

    def __init__(self, levels: Iterable[_Level] = ()) -> None:
        """Begin with `levels`, the newest first."""
        self.levels = list(levels) or [array("d")]

    def __len__(self) -> int:
        """Return how many buckets there are."""
        return sum(map(len, self.levels)) // _WIDTH

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets, oldest first."""
        for level in reversed(self.levels):
            for at in range(0, len(level), _WIDTH):
                yield Bucket(*level[at : at + _WIDTH])

    @property
    def newest(self) -> Bucket | None:
        """Return the bucket of the newest step."""
        level = self.levels[0]
        return Bucket(*level[-_WIDTH:]) if level else None

    def add(self, step: int, at_s: float, value: float, capacity: int) -> None:
        """Take a value, which need not be of a later step than the newest one."""
        newest = self.levels[0]
        if not newest or step > newest[-_WIDTH]:
            newest.extend((step, step, at_s, 1.0, value, value, value, value))
        else:
            self._add_older(step, array("d", (step, step, at_s, 1.0, value, value, value, value)))
        if len(newest) >= capacity * _WIDTH:
            self._spill(0, capacity)

    def _add_older(self, step: int, one: _Level) -> None:
        """Put a value where its step belongs, in the place of one that is kept singly."""
        newest = self.levels[0]
        older = next((level for level in self.levels[1:] if level), None)
        if step < newest[0] and older is not None and step <= older[1 - _WIDTH]:
            self._fold(step, one)
            return
        place = _find(newest, step)
        known = place >= 0 and newest[place * _WIDTH] == step
        begin = (place if known else place + 1) * _WIDTH
        newest[begin : begin + _WIDTH * known] = one

    def _fold(self, step: int, one: _Level) -> None:
        """Put a value of long ago into the bucket of its steps."""
        levels = [level for level in self.levels[1:] if level]
        level = next((each for each in levels if step >= each[0]), levels[-1])
        begin = max(_find(level, step), 0) * _WIDTH
        level[begin : begin + _WIDTH] = array("d", _join(level[begin : begin + _WIDTH] + one))

    def coarsen(self, capacity: int) -> None:
        """Have no level with more than `capacity` buckets."""
        number = 0
        while number < len(self.levels):
            while len(self.levels[number]) >= capacity * _WIDTH:
                self._spill(number, capacity)
            number += 1

    def _spill(self, number: int, capacity: int) -> None:
        """Join the older half of a level in pairs, for the next one."""
        level = self.levels[number]
        half = capacity // 4 * 2 * _WIDTH
        if number + 1 == len(self.levels):
            self.levels.append(array("d"))
        coarser = self.levels[number + 1]
        for at in range(0, half, 2 * _WIDTH):
            coarser.extend(_join(level[at : at + 2 * _WIDTH]))
        del level[:half]
        if len(self.levels[number + 1]) >= capacity * _WIDTH:
            self._spill(number + 1, capacity)


def _find(level: _Level, step: float) -> int:
    """Return the number of the last bucket that begins at `step` or before it; -1 for none."""
    places = range(len(level) // _WIDTH)
    return bisect_right(places, step, key=lambda place: level[place * _WIDTH]) - 1


def _join(pair: _Level) -> tuple[float, ...]:
    """Return two buckets as one. A mean over what is no number is none either."""
    a_first, a_step, a_at_s, a_count, a_mean, a_low, a_high, a_last = pair[:_WIDTH]
    b_first, b_step, b_at_s, b_count, b_mean, b_low, b_high, b_last = pair[_WIDTH:]
    count = a_count + b_count
    mean = a_mean * (a_count / count) + b_mean * (b_count / count)
    low = a_low if a_low <= b_low or b_low != b_low else b_low
    high = a_high if a_high >= b_high or b_high != b_high else b_high
    if b_step >= a_step:
        return min(a_first, b_first), b_step, b_at_s, count, mean, low, high, b_last
    return min(a_first, b_first), a_step, a_at_s, count, mean, low, high, a_last


class Curves:
    """All curves of a job, and what is not in them."""

    def __init__(self) -> None:
        """Begin empty."""
        self.capacity = CAPACITY
        self.curves: dict[str, Curve] = {}
        self.dropped: dict[str, DroppedCount] = {}
        """Source -> its values that were dropped on their way, or here."""
        self._unchecked = 0

    def take(
        self,
        at_s: float,
        source: str,
        rows: Iterable[tuple[int, Mapping[str, float]]],
        dropped: int,
    ) -> None:
        """Take what `source` has logged: (step, values), and so many values that it had to drop."""
        for step, values in rows:
            for name, value in values.items():
                curve = self.curves.get(name)
                if curve is None:
                    if len(self.curves) >= NAMES_MAX:
                        dropped += 1
                        continue
                    curve = self.curves[name] = Curve()
                curve.add(step, at_s, value, self.capacity)
                self._unchecked += 1
        if dropped > 0:
            self.count_dropped(at_s, source, dropped)
        if self._unchecked >= _CHECK_EVERY:
            self.coarsen()

    def coarsen(self) -> None:
        """Have all curves together take no more room than they may."""
        self._unchecked = 0
        while sum(map(len, self.curves.values())) > BUCKETS_MAX and self.capacity > CAPACITY_MIN:
            self.capacity //= 2
            for curve in self.curves.values():
                curve.coarsen(self.capacity)

    def count_dropped(self, at_s: float, source: str, count: int) -> None:
        """Count values that are in no curve; those of very many sources together."""
        if source not in self.dropped and len(self.dropped) >= _SOURCES_MAX:
            source = _OTHERS
        entry = self.dropped.setdefault(source, DroppedCount(first_s=at_s))
        entry.count, entry.last_s = entry.count + count, max(entry.last_s, at_s)

    def list_until(self, at_s: float) -> "Curves":
        """Return what had been logged by job time `at_s`."""
        found = Curves()
        found.capacity = self.capacity
        for name, curve in self.curves.items():
            levels = [array("d") for _ in curve.levels]
            for kept, level in zip(levels, curve.levels, strict=True):
                for at in range(0, len(level), _WIDTH):
                    if level[at + 2] <= at_s:
                        kept.extend(level[at : at + _WIDTH])
            if any(levels):
                found.curves[name] = Curve(levels)
        return found

    def list_buckets(self) -> dict[str, list[Bucket]]:
        """Return what was logged under each name, by step."""
        return {name: list(curve) for name, curve in sorted(self.curves.items())}

    def list_newest(self) -> dict[str, float]:
        """Return the value of the newest step under each name."""
        newest = ((name, curve.newest) for name, curve in sorted(self.curves.items()))
        return {name: bucket.last for name, bucket in newest if bucket is not None}


def encode_curves(curves: Curves) -> bytes:
    """Return `curves` as a line that says what follows, and the buckets as doubles."""
    levels = {
        name: tuple(len(level) // _WIDTH for level in curve.levels)
        for name, curve in curves.curves.items()
    }
    header = encode(_Header(curves.capacity, levels, curves.dropped)) + b"\n"
    body = (level.tobytes() for curve in curves.curves.values() for level in curve.levels)
    return header + b"".join(body)


def decode_curves(data: bytes) -> Curves:
    """Return the curves in `data`.

    Raises:
        ProtocolError: it has none, or not as many as it says.
    """
    first, _, body = data.partition(b"\n")
    header: _Header = decode(first, _Header)
    sizes = [size for levels in header.levels.values() for size in levels]
    if header.version != 1 or min(sizes, default=0) < 0 or len(body) != 8 * _WIDTH * sum(sizes):
        raise ProtocolError("these are no curves, or not all of them")
    curves, at = Curves(), 0
    curves.capacity = max(header.capacity, CAPACITY_MIN)
    curves.dropped = dict(header.dropped)
    for name, sizes_ in header.levels.items():
        levels = []
        for size in sizes_:
            levels.append(array("d", body[at : at + 8 * _WIDTH * size]))
            at += 8 * _WIDTH * size
        curves.curves[name] = Curve(levels)
    return curves
