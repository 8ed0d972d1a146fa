"""A fault at each point of each part, alone and in pairs; each job has to end as it should.

Each run is a short job, supervised, resumable, elastic or torchft in turn, in which a rank and the
controller are killed on the way, and besides the faults of `docs/failpoints.md` that were drawn
for it happen. What is then looked at is said by `check`. A job that an undisturbed machine runs in
S seconds has 4 S + 60: one that takes longer hangs, which is a finding as well.

First each depth runs once with nothing but these kills, which tells how often each point is
passed. A point that none passes is a finding: nothing would be known of it. Runs are lines of
`--out`, with seed, commit and load; those that are there are not run again. A home is kept where
something was wrong.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from campaign import find_parts, leftovers
from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from perdure.failpoints import FOLDER, SWITCH
from perdure.failpoints.points import POINTS
from perdure.model.chain import EntryReader
from perdure.service.jobfiles import MINE

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
STEPS = 45
KILL_AT = STEPS // 3
NAME = "job"
PAUSE_AT, PAUSE_S = 10, 30.0
PAUSED = ("supervisor", "controller", "agent", "keeper", "zygote", "nats", "rank", "all")
CLOCK_STEPS = ((5, 3600.0), (KILL_AT - 2, -86_400.0), (KILL_AT + 5, 0.5), (KILL_AT + 15, 86_400.0))
"""Step -> how many seconds the wall clock is ahead from then on."""
SNAPSHOTS = "snapshot/every=take(15)"
"""A short job has none otherwise."""
UNATTRIBUTED_MAX = 0.02
TRACEBACK = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+", re.MULTILINE)
OURS = re.compile(r"/perdure/(adapters|agent|cli|control|files|keeper|launch|service|worker)/")
"""What nats-py logs of itself while a part leaves is its own."""
LEAVE_S = 15.0
"""Given to what a killed supervisor has left."""

ABOUT = (
    "endpoint.json", "controller.json", "agent-*.json", "parts.json", "state.json", "job.json",
    "journal.jsonl", "nats-server.conf", "imports.json", "latest", "manifest.json", "part-*.json",
    "g*-r*.json", "*.head", "[0-9]*.json", f"{NAME}.json", "PULL_*.json",
    "a[0-9]*-*", "run-*", "l[0-9]*-*",
)  # fmt: skip
"""Of files and senders those that are told apart; other files are passed over."""


class Try(NamedTuple):
    """What is tried, under a key by which it is known again."""

    key: str
    depth: str
    terms: str


@dataclass(frozen=True)
class Depth:
    """One way to run a job."""

    name: str
    script: Path
    options: tuple[str, ...]
    args: tuple[str, ...] = ()
    config: str = ""
    """More of the job file, from its section `checkpoint` on."""

    def command(self, trail: Path, spec: Path) -> list[str]:
        """Return the command line, whose script leaves its trail in `trail`."""
        home = str(spec.parent)
        options = [word.replace("HOME", home) for word in self.options]
        words = ["--trail", str(trail), "--steps", str(STEPS), "--pace-s", "0.05", *self.args]
        if self.name == "torchft":
            words = [str(3 * STEPS), str(trail)]  # Who was killed comes back meanwhile.
        spec.write_text(
            f'script = "{self.script}"\nargs = {json.dumps(words)}\n[restart]\nmax_restarts = 10\n'
            f"[checkpoint]\nevery_steps = 10\n{self.config.replace('HOME', home)}"
        )
        return [sys.executable, "-m", "perdure", "run", "--name", NAME, *options, "-c",
                str(spec)]  # fmt: skip


DEPTHS = (
    Depth("cold", ROOT / "bench" / "scripts" / "counting.py", ("-n", "2", "--cold")),
    Depth("supervised", ROOT / "bench" / "scripts" / "plain_exact.py", ("-n", "2")),
    Depth("resumable", SCRIPTS / "train_exact.py", ("-n", "2")),
    Depth("elastic", SCRIPTS / "elastic.py", ("-n", "3"), ("--exact",)),
    Depth("torchft", SCRIPTS / "torchft_groups.py", ("-n", "1", "--torchft", "--replicas", "2")),
    Depth("remote", SCRIPTS / "train_exact.py", ("-n", "2"), config='url = "local://HOME/far"\n'),
    Depth(
        "arbiter",
        SCRIPTS / "train_exact.py",
        ("-n", "1", "--nodes", "2", "--replicate", "2", "--arbiter", "HOME/shared"),
    ),
)
"""`cold` is a program without torch; `remote` has its checkpoints at a URL, `arbiter` journal and
lease in a shared folder."""
SSH = Depth("ssh", SCRIPTS / "train_exact.py", ())
"""A job that is launched and pulled; the faults are in the commands, and no rank is killed."""


class Run:
    """One job with its faults, in a home of its own."""

    def __init__(self, depth: Depth, terms: str, *, kill: bool = True) -> None:
        """Make the home; nothing is started.

        `terms` are those of failpoints, `pause PART` or `clock`.
        """
        self.depth, self.terms = depth, terms
        self._deeds: list[tuple[int, Callable[[int], bool]]] = []
        """Step -> what is done then, with the supervisor's pid; it returns whether it was."""
        if kill:
            self._deeds = [(KILL_AT, self._kill_rank), (KILL_AT + 10, self._kill_controller)]
        verb, _, part = terms.partition(" ")
        if verb == "pause":
            self.terms, self._deeds = "", [(PAUSE_AT, partial(self._pause, part))]
        if verb == "clock":
            self.terms = ""
            self._deeds += [(at, partial(self._step_clock, s)) for at, s in CLOCK_STEPS]
            self._deeds.sort(key=lambda deed: deed[0])
        self.home = Path(tempfile.mkdtemp(prefix="perdure-fp-"))
        self.trail, self.folder = self.home / "trail", self.home / "points"
        for folder in (self.trail, self.folder, self.home / "shared", self.home / "far"):
            folder.mkdir()
        self.job = self.home / "state" / "jobs" / NAME
        self._env = os.environ | {"PERDURE_HOME": str(self.home / "state"), "STEP_PAUSE_S": "0.05"}
        self._shift, self.shifted = self.home / "shift", verb == "clock"
        if self.shifted:
            self._step_clock(0.0, 0)
            self._env |= {"LD_PRELOAD": build_clock(self.home), "SHIFTED_CLOCK": str(self._shift)}
        self.code = 0

    def start(self, terms: str) -> "subprocess.Popen[bytes]":
        """Start the job with `terms` switched."""
        env = self._env | {SWITCH: terms, FOLDER: str(self.folder)}
        command = self.depth.command(self.trail, self.home / "job.toml")
        with open(self.home / "out", "ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=self.home)

    def run(self, limit_s: float) -> list[str]:
        """Run the job to its end, again where its supervisor was killed; return what is wrong."""
        process = self.start(self.terms)
        wrong = self._wait(process, limit_s)
        if self.code == -signal.SIGKILL or self._is_refused():
            wrong += self._wait_gone()
            process = self.start("")
            wrong += self._wait(process, limit_s)
        return wrong

    def _is_refused(self) -> bool:
        """Return whether the supervisor said in a line that it cannot start, as it had to."""
        said = (self.home / "out").read_text(errors="replace")
        refused = self.code == 3 and "perdure: error: " in said and "Traceback" not in said
        return refused and any("error" in line for line in self.read("fired"))

    def _wait(self, process: "subprocess.Popen[bytes]", limit_s: float) -> list[str]:
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            while self._deeds and self.find_step() >= self._deeds[0][0]:
                if not self._deeds[0][1](process.pid):
                    break
                self._deeds.pop(0)
            time.sleep(0.1)
        if process.poll() is not None:
            self.code = process.returncode
            return []
        self._look(process.pid)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        self.code = process.wait()
        self._wait_gone()
        return [f"no end in {limit_s:.0f} s at step {self.find_step()}"]

    def _look(self, pid: int) -> None:
        """Keep the stacks of what hangs."""
        with open(self.home / "stacks", "w") as out:
            for one in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
                    print(one.pid, one.status(), one.cmdline()[:3], file=out, flush=True)
                    if "python" in one.exe():
                        words = [str(Path(sys.executable).parent / "py-spy"), "dump", "-n", "-p"]
                        subprocess.run([*words, str(one.pid)], stdout=out, stderr=out, timeout=20)

    def _kill_rank(self, pid: int) -> bool:
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if re.match(rf"perdure rank {NAME} g\d+ r1:", one.cmdline()[0]):
                    one.send_signal(signal.SIGKILL)
                    for staging in self.job.glob("staging-*"):  # As where its machine went too.
                        shutil.rmtree(staging, ignore_errors=True)
                    return True
        return False

    def _kill_controller(self, pid: int) -> bool:
        found = find_parts(pid).get("controller", [])
        for one in found[:1]:
            one.send_signal(signal.SIGKILL)
        return bool(found)

    def _pause(self, part: str, pid: int) -> bool:
        """Stop one part, or all that there is, for `PAUSE_S`."""
        parts = find_parts(pid)
        if part in ("supervisor", "all"):
            parts["supervisor"] = [psutil.Process(pid)]
        stopped = [one for name, found in parts.items() if part in (name, "all") for one in found]
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.suspend()
        time.sleep(PAUSE_S)
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.resume()
        return bool(stopped)

    def _step_clock(self, ahead_s: float, pid: int) -> bool:
        """Have the wall clock of all processes of the job be so far ahead from now on."""
        with open(self._shift, "r+b" if self._shift.exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))
        return True

    def _wait_gone(self) -> list[str]:
        deadline = time.monotonic() + LEAVE_S
        while (left := leftovers(self.home)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for line in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        return [f"left: {line}" for line in left]

    def find_step(self) -> int:
        """Return the newest step of any rank; -1 before there is one."""
        steps = [rows[-1]["step"] for rows in self.read_trail().values() if rows]
        return max(steps, default=-1)

    def read_trail(self) -> dict[str, list[dict[str, Any]]]:
        """Return what each rank, or group, has written."""
        return read_trail(self.trail)

    def read(self, name: str) -> list[str]:
        """Return the lines of `hits` or `fired`."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def list_days(self) -> set[str]:
        """Return the days that the parts' logs are of."""
        logs = (path.read_text(errors="replace") for path in (self.job / "logs").glob("*.log"))
        return {day for text in logs for day in re.findall(r"^(\d{4}-\d\d-\d\d) ", text, re.M)}

    def report(self) -> dict[str, Any]:
        """Return `perdure report --json`."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "report", NAME, "--json"],
            env=self._env, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        return document


class Launch(Run):
    """A job on a box behind a real sshd: launched, waited for, pulled and verified.

    The faults happen in the commands here. One that fails or is killed is given again without
    them, and has to succeed then.
    """

    COMMANDS = (
        ("launch", "job.toml", "--on", "box"),
        ("pull", NAME, "pulled"),
        ("verify", "pulled"),
    )

    def __init__(self, depth: Depth, terms: str, *, kill: bool = True) -> None:
        """Make the home, the project, and a box."""
        super().__init__(depth, terms, kill=False)
        from tests.e2e.box import make_boxes

        self._boxes = make_boxes(self.home)
        self.laptop = next(self._boxes)()
        project = self.laptop.folder / "project"
        (project / "trail").mkdir(parents=True)
        shutil.copy(depth.script, project / "train.py")
        (self.laptop.folder / "job.toml").write_text(
            f'name = "{NAME}"\nscript = "train.py"\nnproc = 2\n'
            f'args = ["--trail", "trail", "--steps", "{STEPS}"]\n[checkpoint]\nevery_steps = 10\n'
            '[launch]\nproject = "project"\noutputs = ["trail"]\n'
        )
        self.job = self.laptop.folder / "pulled" / "job"
        self.trail = self.laptop.folder / "pulled" / "outputs" / "trail"
        self._env = self.laptop.env

    def run(self, limit_s: float) -> list[str]:
        """Give all commands; return what is wrong."""
        try:
            wrong = [self._give(command, limit_s) for command in self.COMMANDS]
            there = self.laptop.box.home / "perdure" / NAME / "launch"
            starts = json.loads((there / "start.json").read_text())["attempt"]
            wrong += [f"the job was started {starts} times"] * (starts != 1)
            return [line for line in wrong if line]
        finally:
            with contextlib.suppress(StopIteration):
                next(self._boxes)

    def _give(self, command: tuple[str, ...], limit_s: float) -> str:
        """Give one command, and once more where it did not succeed; return what is wrong."""
        for terms in (self.terms, ""):
            done = self._say(command, terms, limit_s)
            if done.returncode == 0:
                break
        if command[0] == "launch" and self._ask_state() != "not started":
            self._wait_ended(limit_s)  # The second one is refused where the first has started it.
            return ""
        if done.returncode == 0:
            return ""
        return f"{command[0]}: {done.returncode}: {done.stderr.strip()[-300:]}"

    def _say(
        self, command: tuple[str, ...], terms: str, limit_s: float
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *command],
            env=self._env | {SWITCH: terms, FOLDER: str(self.folder)},
            cwd=self.laptop.folder, capture_output=True, text=True, timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        with open(self.home / "out", "a") as out:
            print(command, done.returncode, done.stdout, done.stderr, file=out)
        return done

    def _ask_state(self) -> str:
        there = self.laptop.box.home / "perdure" / NAME / "launch"
        attempts = []
        for name in ("start.json", "exit.json"):
            with contextlib.suppress(OSError):
                attempts.append(json.loads((there / name).read_text())["attempt"])
        if not attempts:
            return "not started"
        return "ended" if attempts[0] == attempts[-1] and len(attempts) == 2 else "running"

    def _wait_ended(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._ask_state() == "running" and time.monotonic() < deadline:
            time.sleep(0.2)

    def report(self) -> dict[str, Any]:
        """Return `perdure report --json`, which is asked on the box."""
        found = self.laptop.box.home / "perdure" / "state"
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "report", NAME, "--json"],
            env=os.environ | {"PERDURE_HOME": str(found)},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def read_trail(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank, or group, has written; what a kill has cut short is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = found[path.stem] = []
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return found


# --- what has to be so afterwards -----------------------------------------------------------------


def check(run: Run, reference: Path) -> list[str]:
    """Return what is wrong with a job that has ended, a line each."""
    wrong = [] if run.code == 0 else [f"exit code {run.code}"]
    wrong += [f"left: {line}" for line in leftovers(run.home)]
    wrong += check_state(run, reference)
    wrong += check_journal(run.job)
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
        if lives != sorted(lives):
            wrong.append(f"{name}: two generations at once")
    names = ["any"] if run.depth.name == "elastic" else list(wanted)
    missing = [(name, step) for name in names for step in range(STEPS) if not seen[name, step]]
    return wrong[:5] + [f"steps missing: {missing[:5]}"] * bool(missing)


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


# --- what is tried --------------------------------------------------------------------------------


def build_clock(folder: Path) -> str:
    """Return the library by which a wall clock is another."""
    library = folder / "shifted_clock.so"
    source = ROOT / "bench" / "scripts" / "shifted_clock.c"
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
    subprocess.run(words, check=True, timeout=60)
    return str(library)


def find_uses(run: Run) -> Counter[str]:
    """Return how often each point was passed, by name and what it was about."""
    uses: Counter[str] = Counter()
    for line in run.read("hits"):
        name, about, _ = line.split("\t")
        if not name.startswith(("file/", "outbox/")):
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
            case "take" if name in ("journal/mirror", "curves/append"):
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


def make_run(depth: Depth, terms: str, *, kill: bool = True) -> Run:
    """Return a run of `depth`; nothing is started."""
    return (Launch if depth is SSH else Run)(depth, terms, kill=kill)


class Reference(NamedTuple):
    """What is known of a depth before it is tried."""

    trail: Path
    """What an undisturbed job has written."""
    uses: Counter[str]
    limit_s: float
    """A job that takes longer hangs."""


def make_reference(depth: Depth, folder: Path) -> Reference:
    """Return the reference of a depth: that of an earlier piece of the same campaign, in `folder`.

    Raises:
        SystemExit: a job without a fault does not end well.
    """
    known = folder / depth.name / "uses.json"
    if not known.exists():
        run_well(make_run(depth, "", kill=False), folder / depth.name / "trail")
        began = time.monotonic()
        run = make_run(depth, SNAPSHOTS)
        run_well(run)
        uses, seconds = find_uses(run), time.monotonic() - began
        shutil.rmtree(run.home, ignore_errors=True)
        known.write_text(json.dumps({"uses": uses, "s": seconds}))
    document = json.loads(known.read_text())
    limit_s = 4 * document["s"] + 60
    return Reference(folder / depth.name / "trail", Counter(document["uses"]), limit_s)


def run_well(run: Run, keep: Path | None = None) -> None:
    """Run a job that has no fault, and `keep` its trail."""
    wrong = run.run(600) + ([] if run.code == 0 else [f"exit code {run.code}"])
    if wrong:
        said = (run.home / "out").read_text(errors="replace")
        raise SystemExit(f"{run.depth.name} without a fault: {wrong}: {run.home}\n{said[-2000:]}")
    if keep is not None:
        shutil.copytree(run.trail, keep)
        shutil.rmtree(run.home, ignore_errors=True)


def read_commit() -> str:
    """Return the commit of this tree."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()


def try_one(one: Try, depth: Depth, reference: Reference) -> dict[str, Any]:
    """Run one job; return its line."""
    began = time.monotonic()
    more = "=" in one.terms and "snapshot/every" not in one.terms
    run = make_run(depth, f"{one.terms}; {SNAPSHOTS}" if more else one.terms)
    load = os.getloadavg()[0]
    try:
        wrong = run.run(reference.limit_s)
        wrong += check(run, reference.trail)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    fired = run.read("fired")
    row = {
        "key": one.key, "depth": one.depth, "terms": one.terms, "fired": len(fired),
        "wrong": wrong, "load": round(load, 1), "s": round(time.monotonic() - began, 1),
        "home": str(run.home) if wrong else "",
    }  # fmt: skip
    if not wrong:
        shutil.rmtree(run.home, ignore_errors=True)
    return row


def show_uses(uses: dict[str, Counter[str]]) -> list[str]:
    """Print how often each point was passed; return the points that none has passed."""
    for use in sorted({use for found in uses.values() for use in found}):
        counts = "  ".join(f"{name} {found[use]:4d}" for name, found in uses.items())
        print(f"{use:40s} {counts}", file=sys.stderr)
    passed = {use.partition(" ")[0] for found in uses.values() for use in found}
    return sorted(set(POINTS) - passed)


def choose(args: argparse.Namespace, uses: dict[str, Counter[str]]) -> Iterator[Try]:
    """Yield what is to be tried, in order."""
    if args.only:
        yield Try(f"only {args.only}", args.depths[0], args.only)
    elif args.pauses:
        for depth, part in itertools.product(uses, PAUSED):
            yield Try(f"pause {part} {depth}", depth, f"pause {part}")
        for depth in uses:
            yield Try(f"clock {depth}", depth, "clock")
    if args.only or args.pauses:
        return
    if not args.pairs_only:
        yield from plan_alone(uses, args.seed)
    if not args.alone:
        yield from draw_pairs(uses, args.seed)


def main() -> int:
    """Run the campaign; exit code 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "failpoints.jsonl")
    parser.add_argument("--depths", nargs="+", default=[d.name for d in (*DEPTHS, SSH)])
    parser.add_argument("--alone", action="store_true", help="no pairs")
    parser.add_argument("--pairs-only", action="store_true")
    parser.add_argument("--pauses", action="store_true", help="pauses, and steps of the clock")
    parser.add_argument("--only", default="", help="these terms, in the first of --depths")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.hours * 3600
    commit = read_commit()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {row["key"] for row in map(json.loads, lines)}
    depths = {depth.name: depth for depth in (*DEPTHS, SSH) if depth.name in args.depths}
    folder = args.out.with_suffix("")
    references = {name: make_reference(depth, folder) for name, depth in depths.items()}
    uses = {name: reference.uses for name, reference in references.items()}
    unpassed = show_uses(uses)
    bad = 0
    for one in choose(args, uses):
        if one.key in done and not args.only:
            continue
        if time.monotonic() > ends_s:
            break
        row = try_one(one, depths[one.depth], references[one.depth])
        row |= {"seed": args.seed, "commit": commit}
        bad += bool(row["wrong"])
        with open(args.out, "a") as out:
            out.write(json.dumps(row) + "\n")
        reached = row["fired"] or "=" not in one.terms
        verdict = "; ".join(row["wrong"]) or ("ok" if reached else "ok, not reached")
        print(f"{one.depth:11s} {row['s']:6.1f} s  {one.terms}: {verdict}", file=sys.stderr)
    print(json.dumps({"wrong": bad, "unpassed": unpassed, "commit": commit, "seed": args.seed}))
    return 1 if bad or (unpassed and len(depths) > len(DEPTHS)) else 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
