"""Which faults are tried: each of each use of a point, then pairs that a seed draws."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from failpoints.jobs import NAME
from perdure.failpoints.points import POINTS

ABOUT = (
    "endpoint.json", "controller.json", "agent-*.json", "parts.json", "state.json", "job.json",
    "journal.jsonl", "nats-server.conf", "imports.json", "latest", "manifest.json", "part-*.json",
    "attempt.json", "claim.json", "ending.json", "start.json", "exit.json",
    "g*-r*.json", "*.head", "[0-9]*.json", f"{NAME}.json", "PULL_*.json",
    "a[0-9]*-*", "run-*", "l[0-9]*-*",
)  # fmt: skip
"""Of files and senders those that are told apart; other files are passed over."""
TOLD_APART = ("file/", "outbox/", "supervise/write")


class Try(NamedTuple):
    """What is tried, under a key by which it is known again."""

    key: str
    depth: str
    terms: str


def find_uses(hits: Iterable[str]) -> Counter[str]:
    """Return how often each point was passed, by name and what it was about."""
    uses: Counter[str] = Counter()
    for line in hits:
        name, about, _ = line.split("\t")
        if not name.startswith(TOLD_APART):
            uses[name] += 1
        elif pattern := next((one for one in ABOUT if fnmatchcase(about, one)), ""):
            uses[f"{name} {pattern}"] += 1
    return uses


def list_faults(use: str, count: int, chance: random.Random) -> Iterator[str]:
    """Yield each fault that makes sense at a use of a point, as terms."""
    name, _, about = use.partition(" ")
    of = f",about={about}" if about else ""
    for fault in POINTS[name].faults:
        nth = f"{of},nth={chance.randint(1, max(1, round(0.8 * count)))}"
        match fault:
            case "crash":
                yield f"{name}=crash{nth}"
            case "delay" if not name.startswith("file/"):
                yield f"{name}=delay({chance.choice(('0.4', '1.5', '4'))}){nth}"
            case "error" if name == "stream/appended":
                yield f"{name}=error(ETIMEDOUT){nth}"
            case "error":
                number = "EAGAIN" if name == "zygote/fork" else chance.choice(("ENOSPC", "EIO"))
                yield f"{name}=error({number}){nth}"
            case "take" if name == "file/write":
                more = chance.choice(("crash", "error(ENOSPC)"))
                yield f"{name}=take(7){nth}; file/rename={more}{nth}"
            case "take" if name in ("journal/mirror", "curves/append", "queue/append"):
                yield f"{name}=take(7){nth}"
            case "take":
                yield f"{name}=take({chance.randint(5, 40)})"


def plan_alone(uses: dict[str, Counter[str]], seed: int) -> list[Try]:
    """Return each fault of each use, in one of the depths that have it: these take turns.

    How often a point is passed differs from run to run, and so which time is drawn; the keys stay.
    """
    chance = random.Random(seed)
    planned, share = [], Counter[str]()
    for use in sorted({use for found in uses.values() for use in found}):
        having = [depth for depth, found in uses.items() if found[use]]
        for number in range(len(list(list_faults(use, 1, chance)))):
            depth = min(having, key=lambda name: (share[name], chance.random()))
            share[depth] += 1
            terms = list(list_faults(use, uses[depth][use], chance))[number]
            fault = re.findall(r"=(\w+)", terms)[0]
            planned.append(Try(f"alone {use} {fault}", depth, terms))
    chance.shuffle(planned)
    return sorted(planned, key=lambda one: ("delay" in one.key, one.key.startswith("alone file/")))


def draw_pairs(uses: dict[str, Counter[str]], seed: int) -> Iterator[Try]:
    """Yield two faults of one depth at a time, without end."""
    for number in itertools.count(1):
        chance = random.Random(f"pair {number} of {seed}")
        depth = chance.choice(sorted(uses))
        pair = [
            chance.choice(list(list_faults(use, uses[depth][use], chance)))
            for use in chance.sample(sorted(uses[depth]), 2)
        ]
        yield Try(f"pair {number} of {seed}", depth, "; ".join(pair))
