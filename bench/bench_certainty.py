"""When a verdict is reported, and when it is acted upon, beside torchrun: fault x depth.

    bench_certainty.py --out certainty.jsonl                       every piece once: 25 minutes
    bench_certainty.py --out certainty.jsonl --quick --repeat 3    the quick ones up to three times
    bench_certainty.py --table certainty.jsonl

Each piece is one job that harms itself (`scripts/harmed.py`): of two ranks, or two groups of
torchft, under `perdure run` at its defaults, or under torchrun with one restart. It ends as soon
as its figures are known. OUT gets a line a piece and is resumed: what is in it is not done again,
but for pieces that failed. The process group's own time-out is `WAITS_S` where a piece waits for
it, so that it can be waited for; else torch's default for gloo. A dead link and a dead node are
made between four nodes in network namespaces, of which one is spare; they need root (docs/lab.md).

torchrun gets a store of its own for each attempt (TORCH_DISABLE_SHARE_RDZV_TCP_STORE): of the
shared one, torch 2.13's second attempt reads the addresses of the first, and gloo ends with
"connection refused". Elastic ranks and torchft groups call no collectives of their own, which
could differ or wait in a circle, and torchft is on one machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lab import network  # noqa: E402
from tests.lab.episode import name_culprit  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "harmed.py"
WAITS_S, DEFAULT_S = 30.0, 1800.0
FOR_S = 20.0
"""How long a healthy rank is silent."""
START_S, LIMIT_S = 120.0, 90.0
"""How long a piece is waited for until its fault, and after it."""
SETTLE_S = 3.0
"""After a healthy silence, for its verdict to be withdrawn."""
WAITS = ("sleep", "spin", "SIGSTOP", "desync", "circle", "dead link", "dead node")
"""Faults at which torchrun, or perdure, waits for the process group's time-out."""
HEALTHY = ("silent", "evaluate", "agent gap")
NETWORK = ("dead link", "dead node")
NODES, VICTIM, LINK = 3, 2, (1, 2)
RESTARTED = ("supervised", "resumable", "torchrun")
"""Depths at which all begin anew; at the others survivors go on with their step."""
PIECES = [
    *(f"{f} / {d}" for f in ("SIGKILL", "SIGSTOP") for d in
      ("supervised", "resumable", "elastic", "torchft", "torchrun")),
    *(f"{f} / {d}" for f in ("desync", "circle") for d in ("supervised", "resumable", "torchrun")),
    *(f"{f} / {d}" for f in ("exit", "sleep", "spin", "silent") for d in
      ("supervised", "resumable", "elastic", "torchft", "torchrun")),
    "evaluate / supervised",
    "agent gap / supervised",
    "dead link / supervised",
    "dead link / torchrun",
    *(f"dead node / {d}" for d in ("supervised", "elastic", "torchrun")),
]  # fmt: skip
QUICK = [
    n for n in PIECES if n.split(" / ")[0] in ("SIGKILL", "SIGSTOP", "desync", "exit")
    and (not n.endswith("torchrun") or n == "SIGKILL / torchrun")
]  # fmt: skip
WORDS = {
    "circle": "a circle of waiting",
    "exit": "early exit, code 0",
    "sleep": "sleeps for ever, no CPU",
    "spin": "spins for ever, CPU",
    "silent": f"silent for {FOR_S:.0f} s, healthy",
    "evaluate": f"computes alone for {FOR_S:.0f} s, healthy",
    "agent gap": "agent stopped for 2 s, healthy",
}
ACTS = ("AssignNodes", "ReformWorld", "EvictReplica", "EndJob")
"""Decisions that change who trains."""

Row = dict[str, Any]
Line = tuple[str, int, float, int]


class Piece:
    """One job, from its start to its figures."""

    def __init__(self, name: str, folder: Path) -> None:
        """Lay it out in `folder`, where all that it writes goes."""
        self.fault, _, self.depth = name.partition(" / ")
        self.folder, self.trail = folder, folder / "trail"
        self.job = folder / "state" / "jobs" / "job"
        self.timeout_s = WAITS_S if self.fault in WAITS else DEFAULT_S
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Row:
        """Return the figures, in seconds after the fault, None for what was not."""
        with contextlib.ExitStack() as stack:
            lab = stack.enter_context(network.Lab(NODES + 1)) if self.fault in NETWORK else None
            stack.callback(self.end)
            self.start(lab)
            if self.fault in (*NETWORK, "agent gap"):
                self.wait_steps(100)
                self.harm(lab)
            row = self.fold()
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline and not self.is_known(row):
                began = "error" in row
                time.sleep(0.4)
                row = self.fold()
                if began and "error" not in row:
                    deadline = time.monotonic() + LIMIT_S
            if "error" in row:
                row["output"] = (self.folder / "out").read_text(errors="replace")[-1500:]
            return row

    def start(self, lab: network.Lab | None) -> None:
        """Start the launcher, or one on every node of the laboratory."""
        harm = "none" if self.fault in (*NETWORK, "agent gap") else self.fault
        words = [str(SCRIPT), "--fault", harm, "--trail", str(self.trail), "--for-s", str(FOR_S)]
        words += ["--timeout-s", str(self.timeout_s)]
        words += ["--declare"] if self.depth == "resumable" else []
        words += ["--loop", self.depth] if self.depth in ("elastic", "torchft") else []
        if self.depth == "torchrun":
            python = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1"]
            if lab is None:
                self.popen([*python, "--standalone", "--nproc-per-node", "2", *words])
                return
            python += ["--nproc-per-node", "1", "--nnodes", str(NODES), "--rdzv-backend", "c10d"]
            python += ["--rdzv-id", "job", "--rdzv-endpoint", f"{lab.addresses[0]}:29411"]
            for node in (*range(NODES), NODES):
                if node == NODES:  # The spare one, which waits for a place.
                    self.wait_steps(10)
                inside = ["ip", "netns", "exec", lab.space(node), *python]
                # It would look for itself among the addresses of the machine's own name.
                place = ["--local-addr", lab.addresses[node], "--rdzv-conf", f"is_host={node == 0}"]
                self.popen([*inside, *place, *words])
            return
        ranks = ["--torchft", "--replicas", "2", "-n", "1"] if self.depth == "torchft" else []
        if lab is not None:
            placement = str(lab.write_placement(self.folder))
            ranks = ["-n", "1", "--nodes", str(NODES), "--spares", "1", "--placement", placement]
        perdure = [sys.executable, "-m", "perdure", "run", "--name", "job"]
        self.popen([*perdure, *(ranks or ["-n", "2"]), *words])

    def popen(self, command: list[str]) -> None:
        """Start a process below this one."""
        env = dict(os.environ, PERDURE_HOME=f"{self.folder}/state", OMP_NUM_THREADS="1")
        env |= {"COLUMNS": "140", "RUST_LOG": "warn", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0"} if self.fault in NETWORK else {}
        with open(self.folder / "out", "ab") as out:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.folder, stdout=out, stderr=out)
            )

    def code(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        return self.processes[0].poll()

    def wait_steps(self, steps: int) -> None:
        """Wait until the ranks have taken so many steps, each of them."""
        deadline = time.monotonic() + START_S
        while max((row[3] for row in self.lines("step")), default=-1) < steps:
            if self.code() is not None or time.monotonic() > deadline:
                text = (self.folder / "out").read_text(errors="replace")[-1500:]
                raise RuntimeError(f"no training: {text}")
            time.sleep(0.1)

    def harm(self, lab: network.Lab | None) -> None:
        """Make the fault that the script cannot make itself, and note it in the trail."""
        if lab is None:
            children = psutil.Process(self.processes[0].pid).children(recursive=True)
            agent = next(c for c in children if "perdure agent" in " ".join(c.cmdline()))
            self.note("fault")
            agent.suspend()
            time.sleep(2.0)  # As a swapping host would; the supervisor gives it three.
            agent.resume()
            self.note("over")
        else:
            self.note("fault")
            lab.cut(VICTIM) if self.fault == "dead node" else lab.drop_link(*LINK)

    def note(self, kind: str) -> None:
        """Write a line into the trail, as a rank does."""
        with open(self.trail, "a", encoding="utf-8") as file:
            file.write(f"{kind} -1 {time.monotonic():.6f} -1\n")

    def lines(self, *kinds: str) -> list[Line]:
        """Return (kind, rank, monotonic, step) of whole lines of these kinds."""
        text = self.trail.read_text() if self.trail.exists() else ""
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(k, int(r), float(at), int(s)) for k, r, at, s in rows if k in kinds]

    def is_blamed(self, culprit: Row) -> bool:
        """Return whether a culprit is the one that the fault was made at."""
        if self.fault == "dead link":
            return tuple(culprit.get("link") or ()) == LINK
        if self.fault == "dead node":
            ends = culprit.get("link") or (culprit.get("rank"), culprit.get("node"))
            return VICTIM in ends
        if self.fault == "circle":
            return True  # Both wait for each other.
        return bool(culprit.get("rank") == 1)

    def fold(self) -> Row:
        """Return the figures so far."""
        lines = self.lines("begin", "step", "fault", "over")
        fault_s = next((at for kind, _, at, _ in lines if kind == "fault"), None)
        if fault_s is None:
            return {"error": "the fault never took place", "code": self.code()}
        row: Row = {"code": self.code(), "timeout_s": self.timeout_s}
        row |= {"over_s": None, "restarted_s": None, "stepping_s": None}
        base = max((step for kind, _, at, step in lines if kind == "step" and at < fault_s))
        for kind, _, at_s, step in lines:
            after_s = round(at_s - fault_s, 2)
            if after_s <= 0 or (kind == "step" and row["stepping_s"] is not None):
                continue
            if kind == "over":
                row["over_s"] = after_s
            elif kind == "begin" and row["restarted_s"] is None:
                row["restarted_s"] = after_s
            elif kind == "step" and (
                row["restarted_s"] is not None if self.depth in RESTARTED else step > base + 1
            ):
                row["stepping_s"] = after_s
        if self.depth == "torchrun":
            return row
        endpoint = json.loads((self.job / "endpoint.json").read_text())
        text = (self.job / "journal.jsonl").read_text()
        entries = [json.loads(x) for x in text[: text.rfind("\n") + 1].splitlines()]
        return row | self.fold_journal(entries, fault_s + endpoint["clock_offset_s"])

    def fold_journal(self, entries: list[Row], fault_s: float) -> Row:
        """Return when the fault was reported and acted upon, as what, and on which ground."""
        row: Row = {"kind": None, "reported_s": None, "acted_s": None, "ground": "", "why": ""}
        row |= {
            "acts_at_s": None,
            "due_ground": "",
            "activity": "",
            "withdrawn": False,
            "stops": False,
            "wrong": [],
        }
        for entry in entries:
            after_s = round(entry["at_s"] - fault_s, 2)
            if row["acted_s"] is not None:
                is_end = entry["body"]["type"] == "JobEnded"
                row["stops"] |= is_end and after_s < row["acted_s"] + SETTLE_S
            if after_s < 0 or row["acted_s"] is not None:
                continue
            told = self.find_report(entry["body"], row, fault_s)
            if told and row["reported_s"] is None:
                row["reported_s"], row["kind"] = after_s, told
            body = entry["body"]
            left_out = body["type"] == "ReplicaSeen" and body.get("gone")
            if left_out or (body["type"] == "Decision" and body["action"] in ACTS):
                row["acted_s"], row["why"] = after_s, body.get("reason", "")[:200]
                row["ground"] = row["ground"] or (
                    "stopped" if body.get("stopped") else "ended" if row["ended"] else "timeout"
                )
                if row["reported_s"] is None:
                    row["reported_s"], row["kind"] = after_s, "the action itself"
        row.pop("ended", None)
        return row

    def find_report(self, body: Row, row: Row, fault_s: float) -> str:
        """Return as what an event reports the fault, if it does; take its ground into `row`."""
        row.setdefault("ended", False)
        match body["type"]:
            case "VerdictReached":
                verdict = body["verdict"]
                if not self.is_blamed(verdict["culprit"]):
                    row["wrong"].append(f"{verdict['kind']} of {name_culprit(verdict['culprit'])}")
                    return ""
                row["activity"] = verdict.get("activity", "")
                if "acts_s" in verdict:
                    row["acts_at_s"] = round(verdict["acts_s"] - fault_s, 1)
                    row["due_ground"] = verdict.get("ground", "")
                if verdict.get("actionable"):
                    row["ground"] = verdict.get("ground", "")
                return str(verdict["kind"])
            case "VerdictWithdrawn":
                row["withdrawn"] = True
            case "RankExited" if not body["record"].get("asked"):
                record, early = body["record"], row["ended"]
                row["ended"] = True
                if not (record.get("code") or record.get("signal")):
                    return ""
                return "EarlyExit" if early else "Crash"
            case "NodeLost" | "KeeperLost" as kind:
                row["ground"] = row["ground"] or "silent"
                return str(kind)
            case "ReplicaLate" if body["group"] == 1:
                row["withdrawn"] = row["withdrawn"] or bool(body.get("over"))
                return "ReplicaLate"
            case "ReplicaSeen" if body.get("gone"):
                return "ReplicaSeen"
            case _:
                pass
        return ""

    def is_known(self, row: Row) -> bool:
        """Return whether waiting for longer would teach nothing."""
        if self.code() is not None:
            return True
        if "error" in row:
            return False
        since_s = time.monotonic() - self.lines("fault")[0][2]
        if self.fault in HEALTHY:
            acted = row.get("acted_s") is not None
            return acted or bool(row["over_s"] and since_s > row["over_s"] + SETTLE_S)
        if self.depth == "torchrun" or row["acted_s"] is not None:
            # A link that stays dead lets nobody train who is started on it again.
            return row["restarted_s" if self.fault == "dead link" else "stepping_s"] is not None
        # Nothing but its own patience makes an elastic job act; its ranks wait for no time-out.
        waits = self.depth == "elastic" and (row["acts_at_s"] or 0.0) > LIMIT_S
        return waits and since_s > row["reported_s"] + SETTLE_S

    def end(self) -> None:
        """End the launchers and all that is below them."""
        family: list[psutil.Process] = []
        for process in self.processes:
            if process.poll() is None:
                root = psutil.Process(process.pid)
                family += [*root.children(recursive=True), root]
                process.send_signal(signal.SIGTERM)
        psutil.wait_procs(family, timeout=6)
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        for process in self.processes:
            process.wait()


def run_piece(name: str, keep: Path | None) -> Row:
    """Run one piece in a folder of its own, which is copied into `keep` where that is given."""
    why = network.why_not() if name.split(" / ")[0] in NETWORK else ""
    if why:
        return {"error": f"not measured: {why}"}
    with tempfile.TemporaryDirectory(prefix="certainty-", ignore_cleanup_errors=True) as folder:
        try:
            return Piece(name, Path(folder)).run()
        except (RuntimeError, OSError, ValueError, StopIteration, psutil.Error) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            if keep is not None:
                into = keep / name.replace(" / ", "-").replace(" ", "-")
                shutil.copytree(folder, into, ignore=shutil.ignore_patterns("nats"))


def render_table(rows: list[Row]) -> str:
    """Return docs/verdicts.md's table, in medians, and what they were measured on."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "error" not in row:
            found[row["name"]].append(row)
    head = ("fault", "depth", "reported after", "acted upon after", "ground")
    head += ("torchrun restarts after", "n")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in (n for n in PIECES if not n.endswith("torchrun")):
        fault, _, depth = name.partition(" / ")
        mine = found.get(name, [])
        other = f"{fault} / torchrun"
        theirs = render_torchrun(found.get(other, [])) if other in PIECES else ""
        grounds = {r["ground"] or r["due_ground"] for r in mine if r["over_s"] is None} - {""}
        cells = [
            WORDS.get(fault, fault),
            depth,
            render_median(mine, "reported_s"),
            render_acted(mine),
            ", ".join(f"`{ground}`" for ground in sorted(grounds)),
            theirs,
            str(len(mine)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *render_circumstances(rows)])


def render_median(rows: list[Row], key: str) -> str:
    """Return a median in seconds; in how many repetitions it was not, if in any."""
    numbers = [row[key] for row in rows if row[key] is not None]
    if not numbers:
        return "never" if rows else "not measured"
    digits = 2 if statistics.median(numbers) < 1 else 1
    missing = (
        f" ({len(rows) - len(numbers)} of {len(rows)} never)" if len(numbers) < len(rows) else ""
    )
    return f"{statistics.median(numbers):.{digits}f}{missing}"


def render_acted(rows: list[Row]) -> str:
    """Return when something was done, or when it would be."""
    text = render_median(rows, "acted_s")
    if any(row["acted_s"] is not None for row in rows):
        return text + (" (the job stops)" if all(row["stops"] for row in rows) else "")
    due = [row["acts_at_s"] for row in rows if row["acts_at_s"] and row["over_s"] is None]
    if due:
        return f"due after {statistics.median(due):.0f} (not waited for)"
    return text + ("; withdrawn" if any(row["withdrawn"] for row in rows) else "")


def render_torchrun(rows: list[Row]) -> str:
    """Return when torchrun's second attempt began, and whether it took a step."""
    text = render_median(rows, "restarted_s")
    if not rows:
        return text
    waited = f"time-out {rows[0]['timeout_s']:.0f} s"
    dead = rows[0]["name"].startswith("dead link")
    if not dead and all(r["restarted_s"] is not None and r["stepping_s"] is None for r in rows):
        waited += f", no step within {LIMIT_S:.0f} s"
    return f"{text} ({waited})"


def render_circumstances(rows: list[Row]) -> Iterator[str]:
    """Yield on what it was measured, what failed, and who was blamed wrongly."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    loads = [row["load"] for row in rows]
    cores = ", ".join(sorted({str(row["cores"]) for row in rows}))
    yield (
        f"Commit {commits}; {cores} cores; load {min(loads):.1f} to {max(loads):.1f}, median "
        f"{statistics.median(loads):.1f}; {sum(r['took_s'] for r in rows) / 60:.0f} minutes."
    )
    done = {(row["name"], row["n"]) for row in rows if "error" not in row}
    for row in rows:
        if "error" in row and (row["name"], row["n"]) not in done:
            yield f"- {row['name']}: {' '.join(row['error'].split())[:200]}"
        for wrong in sorted(set(row.get("wrong", ()))):
            yield f"- {row['name']}: {wrong} was reported as well"


def parse_lines(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words that a piece's name has")
    parser.add_argument("--quick", action="store_true", help="SIGKILL, SIGSTOP, desync and exit")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a new folder for logs and journals of pieces")
    args = parser.parse_args()
    if args.table is not None:
        if not parse_lines(args.table):
            parser.error(f"{args.table} has no line yet")
        print(render_table(parse_lines(args.table)))
        return
    sweep_after_me()
    rows = parse_lines(args.out) if args.out is not None else []
    done = {(row["name"], row["n"]) for row in rows if "error" not in row}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    for repetition in range(args.repeat):
        for name in QUICK if args.quick else PIECES:
            wanted = not args.only or any(word in name for word in args.only)
            if not wanted or (name, repetition) in done:
                continue
            load, began_s = os.getloadavg()[0], time.monotonic()
            row = {"name": name, "n": repetition, "commit": commit, "load": round(load, 1)}
            row |= {"cores": os.cpu_count(), **run_piece(name, args.keep)}
            row["took_s"] = round(time.monotonic() - began_s, 1)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
