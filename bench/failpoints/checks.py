"""What has to be so once a job with its faults has ended."""

import json
import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from campaign import leftovers

from failpoints.jobs import STEPS, Run, read_trail
from perdure.files.rotation import list_streams_by_age, measure_file, read_piece
from perdure.model.chain import EntryReader
from perdure.service.jobfiles import MINE

UNATTRIBUTED_MAX = 0.02
TRACEBACK = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+", re.MULTILINE)
OURS = re.compile(r"/perdure/(adapters|agent|cli|control|files|keeper|launch|service|worker)/")
"""What nats-py logs of itself while a part leaves is its own."""


def check(run: Run, reference: Path) -> list[str]:
    """Return what is wrong with a job that has ended, a line each."""
    wrong = [] if run.code == 0 else [f"exit code {run.code}"]
    wrong += [f"left: {line}" for line in leftovers(run.home)]
    wrong += check_state(run, reference)
    wrong += check_journal(run.job)
    if run.depth.name == "loud":
        wrong += check_prints(run.job / "logs" / "ranks")
    if run.shifted and len(run.list_days()) < 2:
        wrong.append("no part has seen the clock step")
    for path in sorted((run.job / "logs").glob("*.log")):
        found = TRACEBACK.findall(path.read_text(errors="replace"))
        if any(OURS.search(text) for text in found):
            wrong.append(f"a traceback in {path.name}")
    try:
        report = run.report()
    except subprocess.CalledProcessError as error:
        return [*wrong, f"no report: {error.stderr[-300:]}"]
    ledger = {name: account["fraction"] for name, account in report["ledger"].items()}
    if abs(sum(ledger.values()) - 1) > 1e-6 or abs(ledger["unattributed"]) > UNATTRIBUTED_MAX:
        wrong.append(f"the ledger does not close: {ledger}")
    restarts = [
        one["culprit"]
        for one in report["recoveries"]
        if one["rung"] == "restart" and (one["at_step"] >= 0 or run.depth.name != "elastic")
    ]  # A member that is lost before there was a world leaves nothing to go on from.
    needed = count_needed(run)
    if len(restarts) > needed:
        wrong.append(f"{len(restarts)} restarts, and the faults needed {needed}: {restarts}")
    return wrong


def count_needed(run: Run) -> int:
    """Return for how many restarts of ranks there was a reason."""
    elastic = run.depth.name == "elastic"
    needed = 0 if elastic else 1  # For the rank that was killed, or paused, or the paused keeper.
    if run.paused == "keeper" and elastic:
        needed = 1  # How its ranks have ended is known to nobody else.
    if run.paused == "rank" and run.depth.name == "torchft":
        needed = 2  # Each is a group, and is started again by itself.
    for line in run.read("fired"):
        name, _, fault, title, _ = line.split("\t")
        ends = fault == "crash" or (fault == "error" and name == "keeper/prepare")
        if ends and title.startswith("perdure keeper"):
            needed += 1
        elif ends and title.startswith(("perdure rank", "perdure store")):
            needed += not elastic
    return needed


def check_state(run: Run, reference: Path) -> list[str]:
    """Each step that a rank has made is what it is in the undisturbed run, and none is missing."""
    trails = run.read_trail()
    if run.depth.name == "torchft":
        hashes: dict[tuple[int, int], set[str]] = {}  # A quorum later it is made again, by others.
        for row in (row for rows in trails.values() for row in rows if "hash" in row):
            hashes.setdefault((row["step"], row["q"]), set()).add(row["hash"])
        wrong = [f"step {at[0]}: groups differ" for at, found in hashes.items() if len(found) > 1]
        ends = {
            name: max((row["step"] for row in rows), default=0) for name, rows in trails.items()
        }
        return wrong + [f"{name} ends at step {end}" for name, end in ends.items() if end < STEPS]
    wanted = read_trail(reference)
    fields = ("losses", "hash") if run.depth.name == "elastic" else ("loss", "indices")
    first = next(iter(wanted.values()))
    wrong, seen = [], Counter[tuple[str, int]]()
    for name, rows in trails.items():
        own = {row["step"]: row for row in wanted.get(name, first)}
        for row in rows:
            seen["any" if run.depth.name == "elastic" else name, row["step"]] += 1
            if any(row[key] != own[row["step"]][key] for key in fields):
                wrong.append(f"{name}, step {row['step']}: not what it was")
        lives = [int(row.get("generation") or 0) for row in rows]
        if sum(after < before for before, after in pairwise(lives)) >= run.runs:
            wrong.append(f"{name}: two generations at once")
    names = ["any"] if run.depth.name == "elastic" else list(wanted)
    missing = [(name, step) for name in names for step in range(STEPS) if not seen[name, step]]
    return wrong[:5] + [f"steps missing: {missing[:5]}"] * bool(missing)


def check_prints(folder: Path) -> list[str]:
    """Return what is missing of the numbered lines that ranks printed, in logs that were cut."""
    wrong, cut = [], 0
    for _, streams in list_streams_by_age(folder):
        for path in sorted(streams.glob("rank-*.out")):
            size, data = measure_file(str(path)), b""
            while len(data) < size:
                begin, piece = read_piece(str(path), len(data), 1 << 22)
                if begin > len(data) or not piece:
                    wrong.append(f"{path.name}: bytes {len(data)} to {begin} of {size} are missing")
                    break
                data += piece
            numbers = [int(line.split()[0]) for line in data.splitlines(keepends=True)[:-1]]
            if numbers != list(range(len(numbers))):
                wrong.append(f"{path.name}: its lines are not what was printed")
            cut += size > path.stat().st_size
    return wrong if cut else [*wrong, "no log was cut"]


def check_journal(job: Path) -> list[str]:
    """Return whether each entry, and each source's events, are there once and in order."""
    lines = (job / "journal.jsonl").read_bytes().splitlines(keepends=True)
    reader = EntryReader(lines, mine=MINE)
    for _ in reader:
        pass
    wrong = [] if reader.tally.whole else [f"the journal: {reader.tally.describe()}"]
    entries = [json.loads(line) for line in lines]
    if not any(entry["body"]["type"] == "JobEnded" for entry in entries):
        wrong.append(f"the journal ends with {entries[-1]['body']['type']}")
    newest: dict[str, int] = {}
    for entry in entries:  # What `run.log` tells has numbers too, and is not in the journal.
        source, number = entry.get("source", ""), entry.get("source_seq", 0)
        if source and number <= newest.get(source, 0):
            wrong.append(f"{source}: event {number} after {newest[source]}")
        newest[source] = number
    ended = Counter[tuple[int, int]]()
    failed: dict[tuple[Any, ...], set[str]] = {}
    for body in (entry["body"] for entry in entries):
        if body["type"] == "RankExited":  # A new agent tells again what its keeper has.
            ended[body["record"]["generation"], body["record"]["rank"]] += 1
        elif body["type"] == "FailureDecided":
            what = body["world"], body.get("epoch", -1), body["cause"], body["culprit"]
            failed.setdefault(what, set()).add(body["id"])
    wrong += [f"{what} is {len(ids)} incidents" for what, ids in failed.items() if len(ids) > 1]
    for path in (job / "exits").glob("g*-r*.json"):
        generation, rank = map(int, re.findall(r"\d+", path.name))
        if not ended[generation, rank]:
            wrong.append(f"{path.name} is on disk, and the journal does not know of it")
    return wrong
