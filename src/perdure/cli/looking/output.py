"""Commands that follow: what the ranks wrote, and what happened (the journal)."""

import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.jobs import find_job, read_start_s, say_damage
from perdure.cli.speech.pages import point_to_pages
from perdure.cli.speech.say import AnyJob, Json, note, print_json
from perdure.launch.exchange import print_output
from perdure.model.errors import ConfigError
from perdure.model.input.plain import REASON_MAX, shorten_line

if TYPE_CHECKING:
    from perdure.model.events import JournalEntry

POLL_S = 0.2
_FILE = re.compile(r"rank-(\d+)\.(out|err)")
_PIECE = 1 << 20
"""Bytes of a line that are shown at once."""
_WIDE = 100
"""Longest value of a field in an event's line; --json has all of it."""
_HIDDEN = ("seq", "t", "kind", "at_s", "account", "accounts", "comms")
"""Shown otherwise, or too long to read; --json has them."""

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]


@dataclass(slots=True)
class Stream:
    """One file of a rank's output, read up to `offset`."""

    generation: int
    rank: int
    name: str
    path: str
    offset: int = 0

    def read(self, *, last: bool) -> Iterator[str]:
        """Yield the whole lines that are new; with `last` also one without an end.

        A line of more than `_PIECE` comes in pieces. What is written while this is read is for
        the next time, however fast it comes. What is not kept any more is said in its place.
        """
        from perdure.files.rotation import measure_file, read_piece

        end = measure_file(self.path)
        while self.offset < end:
            begin, data = read_piece(self.path, self.offset, min(_PIECE, end - self.offset))
            if begin > self.offset:
                page = point_to_pages("docs/observability.md")
                yield f"… {begin - self.offset:,} bytes are not kept ({page})"
                self.offset = begin
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) == _PIECE:
                whole = _count_whole_bytes(data)
            elif not whole and (last or self._is_cut_off(len(data), end)):
                whole = len(data)
            if not whole:
                return
            self.offset += whole
            lines = data[:whole].removesuffix(b"\n").split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def describe(self, line: str) -> dict[str, Any]:
        """Return one of its lines as a document."""
        place = {"generation": self.generation, "rank": self.rank, "stream": self.name}
        return place | {"text": line}

    def _is_cut_off(self, length: int, end: int) -> bool:
        """Return whether what follows the next `length` bytes is not kept."""
        from perdure.files.rotation import read_piece

        after = self.offset + length
        return after < end and read_piece(self.path, after, 1)[0] > after


def _count_whole_bytes(piece: bytes) -> int:
    """Return the length of `piece` without the UTF-8 character at its end, which may go on."""
    for length in range(len(piece) - 1, len(piece) - 4, -1):
        if piece[length] & 0xC0 == 0xC0:
            return length
    return len(piece)


def list_streams(folder: str) -> list[Stream]:
    """Return the ranks' streams below `folder`, by generation, rank and name."""
    found = []
    for path in Path(folder).glob("g*/rank-*"):
        match = _FILE.fullmatch(path.name)
        if match and path.parent.name[1:].isdigit():
            found.append(Stream(int(path.parent.name[1:]), int(match[1]), match[2], str(path)))
    return sorted(found, key=lambda s: (s.generation, s.rank, s.name != "out"))


def logs(
    job: AnyJob,
    follow: Follow = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Without --part: one rank's lines, without a prefix."),
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation", min=0, help="Without --part: its number; default: the newest."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Without --part or --generation: of all generations.")
    ] = False,
    part: Annotated[
        str | None, typer.Option("--part", help="Of perdure's own: controller, agent-0, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the ranks wrote."""
    found = find_job(job)
    if found.spec.served and part is None:
        note(
            f"the groups of job {job} write to the terminals in which others have started them; "
            f"who came and left: perdure logs {job} --part lighthouse"
        )
        return
    if rank is not None and rank >= found.spec.world_size:
        raise ConfigError(
            f"there is no rank {rank}", hint=f"the ranks are 0 to {found.spec.world_size - 1}"
        )
    folder = found.spec.log_dir or os.path.join(found.paths.logs, "ranks")
    known: dict[str, Stream] = {}
    prefixed = rank is None and part is None

    def poll(last: bool) -> None:
        if part is not None:
            path = found.paths.log(part)
            if not os.path.exists(path):
                parts = ", ".join(sorted(log.stem for log in Path(found.paths.logs).glob("*.log")))
                hint = f"there is {parts}" if parts else "it has not been started"
                raise ConfigError(f"no log of a part `{part}`", hint=hint)
            streams = [Stream(-1, -1, part, path)]
        else:
            streams = list_streams(folder)
            newest = max((s.generation for s in streams), default=-1)
            wanted = newest if generation is None else generation
            streams = [
                s
                for s in streams
                if (rank is None or s.rank == rank)
                and (every or s.generation == wanted or s.path in known)
            ]
        for fresh in streams:
            stream = known.setdefault(fresh.path, fresh)
            for line in stream.read(last=last):
                if as_json:
                    print_json(stream.describe(line))
                else:
                    print_output(line, f"[rank {stream.rank}] " if prefixed else "")

    while follow and found.alive:
        poll(False)
        sys.stdout.flush()
        time.sleep(POLL_S)
    poll(True)
    if generation is not None and not known:
        raise _find_missing(generation, folder)


def _find_missing(generation: int, folder: str) -> ConfigError:
    newest = max((s.generation for s in list_streams(folder)), default=-1)
    hint = f"the newest that has is {newest}" if newest >= 0 else "no generation has yet"
    return ConfigError(f"generation {generation} has written nothing", hint=hint)


def events(
    job: AnyJob,
    follow: Follow = False,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only such as VerdictReached; repeatable."),
    ] = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Without --kind or --all: only decisions, and why.")
    ] = False,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Such as 10m, 2h or 14:05.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Number of last lines.")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Without --kind: also kinds that repeat very often.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the journal: what happened, what was decided, and why."""
    from perdure.cli.looking.chosen import BULK, Chosen, read_kinds, read_moment
    from perdure.cli.looking.mirror import MirrorTail
    from perdure.model.events import JobEnded

    found = find_job(job)
    chosen = Chosen(
        kinds=read_kinds(kind or ()),
        left_out=frozenset() if show_all or kind or as_json else BULK,
        decisions=decisions,
        since_s=read_moment(since) if since else 0.0,
    )
    passed = Counter[str]()
    state = {"seq": 0, "start_s": 0.0}

    def select(entries: "Iterable[JournalEntry]") -> "Iterator[JournalEntry]":
        for entry in entries:
            if entry.seq > state["seq"]:
                state["start_s"] = state["start_s"] or read_start_s(entry)
                state["seq"] = entry.seq
                yield from chosen.select([entry], passed)

    def show(entries: "Iterable[JournalEntry]") -> None:
        for entry in entries:
            if as_json:
                print_json(describe_entry(entry))
            else:
                at = time.strftime("%T", time.localtime(entry.at_s))
                print(f"{at} {render_entry(entry, state['start_s'])}", flush=True)

    mirror = MirrorTail(found.paths.journal)
    if follow and found.alive and tail is not None:
        show(deque(select(mirror.poll()), maxlen=tail))
        tail = None
    while follow and found.alive:
        fresh = mirror.poll()
        show(select(fresh))
        if any(isinstance(entry.body, JobEnded) for entry in fresh):
            return
        time.sleep(POLL_S)
    reader = found.read()
    rest = select(reader)
    show(rest if tail is None else deque(rest, maxlen=tail))
    damage = say_damage(reader.tally)
    if damage and as_json:
        print_json(damage)
    if passed:
        kinds = ", ".join(f"{count} {name}" for name, count in passed.most_common())
        note(f"left out: {kinds}; --all shows them")


def describe_entry(entry: "JournalEntry") -> dict[str, Any]:
    """Return an entry as `events --json` shows it: seq, t, kind, then the body's own fields.

    A body's own `kind` (of a fault, of a command) is called `what`.

    >>> from perdure.model.events import TimerFired
    >>> describe_entry(JournalEntry(seq=3, at_s=1.5, body=TimerFired()))
    {'seq': 3, 't': 1.5, 'kind': 'TimerFired'}
    """
    import msgspec

    fields = msgspec.to_builtins(entry.body)
    kind = fields.pop("type")
    own = {"what" if name == "kind" else name: value for name, value in fields.items()}
    return {"seq": entry.seq, "t": entry.at_s, "kind": kind, **own}


def render_entry(entry: "JournalEntry", start_s: float) -> str:
    """Return an entry as one line."""
    from perdure.model.events import Decision

    body = entry.body
    if isinstance(body, Decision):
        text = f"-> {body.action}: {body.summary} ({shorten_line(body.reason, REASON_MAX)})"
    else:
        fields = describe_entry(entry)
        shown = [
            f"{k}={_clip(_since(k, v, start_s))}" for k, v in fields.items() if k not in _HIDDEN
        ]
        text = " ".join([fields["kind"], *shown])
    return f"{entry.seq:6d} {entry.at_s - start_s:9.3f} s  {text}"


def _since(name: str, value: Any, start_s: float) -> Any:
    """Return a moment of the job's clock as the seconds since its start, as the line's own are."""
    moment = name.endswith("_s") and isinstance(value, float) and 0.0 < start_s <= value
    return round(value - start_s, 3) if moment else value


def _clip(value: Any) -> str:
    from perdure.model.codec import encode

    text = value if isinstance(value, str) else encode(value).decode()
    text = text.replace("\n", "\\n")
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
