"""Makes what is too large for one message fit into one: texts are cut, metrics dropped and counted.

How much a message may hold is the server's to say (`max_payload`: perdure's own takes 8 MB, a
cluster's own mostly 1 MB). A fact is never dropped for its size. What grows beyond any size are
free texts (a traceback, stacks, evidence), and those say at the end and at the beginning what they
have to say, so their middle is left out, and the place says so.
"""

from typing import Any, TypeVar, cast

from msgspec.structs import replace

from perdure.model.codec import decode, encode, make_encodable
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, Decision, MetricsLogged
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import NodeBeat

T = TypeVar("T", bound=AnyEvent | Decision | ExitRecord)

EVENT_BYTES_MAX = 262_144
"""Of one event, where its sender makes it."""
_FREE = frozenset(
    {
        "answer", "cause", "error", "evidence", "example", "last_output", "note", "reason",
        "result", "skipped", "stacks", "summary", "traceback", "why_cold", "why_not_exact",
    }
)  # fmt: skip
"""Fields that hold texts for people, or as much evidence as somebody liked to put there."""
_OTHER_MAX = 8192
"""Characters of any other text: no path and no name is as long."""
CUT = "characters, cut] …"
"""How the mark ends that stands where something was cut out of a text."""
_LIMITS = (65_536, 16_384, 4096, 1024, 256, 64)


def cut_text(text: str, limit: int) -> str:
    """Return `text` as it can be encoded; of a long one its beginning, and more of its end."""
    if len(text) <= limit:
        return make_encodable(text)
    mark = f" … [{len(text):,} {CUT} "
    room = max(limit - len(mark), 8)
    return make_encodable(f"{text[: room // 4]}{mark}{text[len(text) - room + room // 4 :]}")


def drop_values(event: MetricsLogged) -> MetricsLogged:
    """Return `event` with its values counted in the place of told."""
    dropped = event.dropped + sum(len(values) for _, values in event.rows)
    return MetricsLogged(generation=event.generation, rows=(), dropped=dropped)


def fit_event(event: T, bytes_max: int) -> T | None:
    """Return `event` as it fits into `bytes_max` bytes: itself, or with its texts cut.

    None where it does not fit even so.
    """
    if len(encode(event)) <= bytes_max:
        return event
    if isinstance(event, MetricsLogged):
        thin = drop_values(event)
        return cast(T, thin) if len(encode(thin)) <= bytes_max else None
    plain: Any = decode(encode(event), Any)
    for limit in _LIMITS:
        data = encode(_cut(plain, limit, free=False))
        if len(data) <= bytes_max:
            try:
                found: T = decode(data, type(event))
            except ProtocolError:
                return None
            return found
    return None


def fit_beat(beat: NodeBeat, bytes_max: int) -> NodeBeat:
    """Return `beat` as it fits into `bytes_max` bytes, if need be without its finer parts.

    That a node and its ranks live, and in what phase, is worth most; a heartbeat that is too large
    would not arrive at all, and its node would be taken for lost.
    """
    for dropped in ("device", "sweep", "spans", "stages", "members", "comms"):
        if len(encode(beat)) <= bytes_max:
            break
        beat = _drop(beat, dropped)
    return beat


def _drop(beat: NodeBeat, what: str) -> NodeBeat:
    """Leave out looks at links, which ranks each communicator has, or a field of the ranks."""
    if what == "sweep":
        return replace(beat, sweep=None, devices=())
    if what == "members":
        thin = [replace(r, comms=tuple(replace(c, ranks=()) for c in r.comms)) for r in beat.ranks]
    else:
        thin = [replace(rank, **{what: ()}) for rank in beat.ranks]
    return replace(beat, ranks=tuple(thin))


def _cut(value: Any, limit: int, *, free: bool) -> Any:
    match value:
        case str():
            return cut_text(value, limit if free else _OTHER_MAX)
        case dict():
            items = list(value.items())
            kept = items[: limit // 8] if free else items
            return {k: _cut(v, limit, free=free or k in _FREE) for k, v in kept}
        case list():
            kept = value[-(limit // 8) :] if free else value
            return [_cut(each, limit, free=free) for each in kept]
    return value
