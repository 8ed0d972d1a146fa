"""100 operator actions at random while ranks, agents and the controller are killed.

A job of two nodes and two spare ones trains; drain, evict, cordon, restore and checkpoint are sent
to it through the command line's own client, with random targets and options, and meanwhile parts
of the job get SIGKILL at random. Each action must be acknowledged, or refused with a reason; what
was acknowledged must be true of the living processes at that moment, and what was refused must
have changed nothing in the journal. With `--torchft` the job is one of three replica groups and a
spare one, and the lighthouse is killed as well.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from sweep import sweep_after_me

from perdure.cli.jobs import find_job, send_command
from perdure.model.errors import SafetyError

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
NODES, SPARES = 2, 2
PARTS = ("rank", "rank", "rank", "controller", "controller", "agent")
VERBS: tuple[Literal["drain", "evict", "cordon", "restore", "checkpoint"], ...] = (
    "drain",
    "drain",
    "evict",
    "cordon",
    "restore",
    "restore",
    "restore",
    "checkpoint",
)


@dataclass
class Bench:
    """One job, its operator, and who kills its parts."""

    home: Path
    chance: random.Random
    gap_s: float
    torchft: bool = False
    process: subprocess.Popen[bytes] | None = None
    kills: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    actions: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of every command."""
        return dict(os.environ, PERDURE_HOME=str(self.home / "state"), STEP_PAUSE_S="0.05")

    def start(self) -> None:
        """Start the job and wait for its first steps."""
        (self.home / "trail").mkdir()
        trail, script = str(self.home / "trail"), SCRIPTS / "train_paced.py"
        args = ["--trail", trail, "--steps", "1000000", "--step-s", "0.05"]
        shape = ["--nodes", str(NODES), "--spares", str(SPARES)]
        if self.torchft:
            script, args = SCRIPTS / "torchft_groups.py", ["1000000", trail]
            shape = ["--torchft", "--replicas", "3", "--spares", "1"]
        spec = self.home / "job.toml"
        spec.write_text(
            f'script = "{script}"\nargs = {json.dumps(args)}\n[checkpoint]\nevery_steps = 40\n'
            "[restart]\nmax_restarts = 100\nsame_fault_max = 100\nwindow_max = 10000\n"
        )
        words = ["run", "--name", "steered", "-n", "1", *shape, "-c", str(spec)]
        with open(self.home / "run.out", "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure", *words],
                stdout=out, stderr=out, env=self.env, cwd=self.home,
            )  # fmt: skip
        deadline = time.monotonic() + 600
        while self.state().get("step", -1) < 5:
            assert time.monotonic() < deadline, (self.home / "run.out").read_text()[-3000:]
            time.sleep(0.2)

    def state(self) -> dict[str, Any]:
        """Return the newest snapshot; empty where there is none."""
        path = self.home / "state" / "jobs" / "steered" / "state.json"
        try:
            document: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return document

    def journal(self) -> list[dict[str, Any]]:
        """Return the bodies of the journal's entries."""
        path = self.home / "state" / "jobs" / "steered" / "journal.jsonl"
        lines = path.read_text().splitlines()
        return [json.loads(line)["body"] for line in lines if line.endswith("}")]

    def find_homes(self) -> dict[int, set[int]]:
        """Return node -> pids of the ranks that live there, from the processes themselves."""
        assert self.process is not None
        homes: dict[int, set[int]] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                mine = "perdure rank " in " ".join(child.cmdline())
                if mine and child.status() != psutil.STATUS_ZOMBIE:
                    homes.setdefault(int(child.environ()["PERDURE_NODE"]), set()).add(child.pid)
            except (psutil.Error, KeyError):
                continue
        return homes

    def kill_at_random(self, chance: random.Random) -> None:
        """Send SIGKILL to a random part again and again."""
        assert self.process is not None
        while not self.over.wait(chance.expovariate(1 / self.gap_s)):
            part = chance.choice(PARTS + ("lighthouse",) * self.torchft)
            found = []
            for child in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    if f"perdure {part} " in " ".join(child.cmdline()):
                        found.append(child)
                except psutil.Error:
                    continue
            if found:
                try:
                    chance.choice(found).send_signal(signal.SIGKILL)
                    self.kills[part] += 1
                except psutil.Error:
                    continue

    def act(self) -> None:
        """Send one command, and check what became of it."""
        verb = self.chance.choice(VERBS)
        args: dict[str, Any] = {}
        if verb != "checkpoint":
            node = self.chance.randrange(NODES + SPARES)
            other = f"replica:{node}" if self.torchft else f"rank:{node % NODES}"
            args["targets"] = [self.chance.choice([f"node:{node}", other])]
            args |= {"dry_run": True} if self.chance.random() < 0.1 else {}
        if verb in ("drain", "evict"):
            args["deadline_s"] = self.chance.choice([1.0, 10.0, 20.0])
            args |= {"wait": True} if self.chance.random() < 0.2 else {}
        if verb == "drain" and self.chance.random() < 0.3:
            args["force"] = True
        before = find_cordoned(self.journal())
        began = time.monotonic()
        told, refused = {}, ""
        try:
            told = send_command(find_job("steered"), verb, args, timeout_s=300.0)
        except SafetyError as error:
            refused = error.message
        homes = self.find_homes()
        took_s = time.monotonic() - began
        what = f"{verb} {args}"
        print(f"{what}: {refused or told.get('reason', told)}", file=sys.stderr, flush=True)
        after = find_cordoned(self.journal())
        if refused or "dry_run" in args:
            self.outcomes[f"{verb} refused" if refused else "dry runs"] += 1
            if after != before:
                self.wrong.append(f"{what}: {refused or told}: {before} became {after}")
            return
        self.outcomes[f"{verb} done"] += 1
        self.took_s.setdefault(verb, []).append(took_s)
        self.judge(what, verb, told, after, homes)

    def judge(
        self,
        what: str,
        verb: str,
        told: dict[str, Any],
        cordoned: dict[int, str],
        homes: dict[int, set[int]],
    ) -> None:
        """Compare what was acknowledged with the journal and with the ranks that live."""
        if not told.get("reason"):
            self.wrong.append(f"{what}: acknowledged without a word: {told}")
        for node in told.get("nodes", told.get("replicas", ())):
            if (verb == "restore") == (node in cordoned):
                self.wrong.append(f"{what}: {told}, but cordons are {cordoned}")
            if verb in ("drain", "evict") and homes.get(node):
                self.wrong.append(f"{what}: {told}, but ranks live there: {homes}")
        if verb == "drain" and not told.get("instead") and told.get("steps_lost"):
            self.wrong.append(f"{what}: {told}: steps were lost")

    def check_journal(self) -> None:
        """Check that every command was taken once and answered once, and never two ways."""
        answers: dict[str, set[str]] = {}
        taken: Counter[str] = Counter()
        for body in self.journal():
            if body["type"] == "CommandReceived":
                taken[body["id"]] += 1
            if body["type"] == "Decision" and body["action"] == "AnswerCommand":
                id_, _, word = body["summary"].rpartition(": ")
                answers.setdefault(id_, set()).add(word)
                if not body["reason"]:
                    self.wrong.append(f"{id_} was answered without a reason")
        self.wrong += [f"{id_} was taken {n} times" for id_, n in taken.items() if n > 1]
        self.wrong += [f"{id_} was never answered" for id_ in taken if id_ not in answers]
        self.wrong += [f"{id_}: {w}" for id_, w in answers.items() if len(w) > 1]

    def stop(self) -> None:
        """End the job."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(240)
        except subprocess.TimeoutExpired:
            self.wrong.append("the job did not end")
            self.process.kill()
            self.process.wait()


def find_cordoned(journal: list[dict[str, Any]]) -> dict[int, str]:
    """Return the cordoned nodes and by whom, as the journal has it."""
    cordoned: dict[int, str] = {}
    for body in journal:
        if body["type"] == "NodeCordoned":
            cordoned[body["node"]] = body.get("who", "")
        elif body["type"] == "NodeRestored":
            cordoned.pop(body["node"], None)
    return cordoned


def main() -> int:
    """Run the bench; exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=100)
    parser.add_argument("--gap-s", type=float, default=6.0, help="mean time between kills")
    parser.add_argument("--seconds", type=float, default=3600.0, help="fewer actions, if need be")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torchft", action="store_true", help="three replica groups and a spare")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="perdure-operator-"))
    os.environ["PERDURE_HOME"] = str(home / "state")
    bench = Bench(home, random.Random(args.seed), args.gap_s, args.torchft)
    killer = threading.Thread(
        target=bench.kill_at_random, args=[random.Random(args.seed + 1)], daemon=True
    )
    try:
        bench.start()
        killer.start()
        deadline = time.monotonic() + args.seconds
        while bench.actions < args.actions and time.monotonic() < deadline:
            bench.act()
            bench.actions += 1
        bench.over.set()
        killer.join(30)
        bench.check_journal()
    finally:
        bench.over.set()
        if bench.process is not None:
            bench.stop()
    for line in bench.wrong:
        print("wrong: " + line, file=sys.stderr)
    medians = {verb: sorted(s)[len(s) // 2] for verb, s in sorted(bench.took_s.items())}
    print(
        json.dumps(
            {
                "actions": bench.actions,
                "outcomes": dict(sorted(bench.outcomes.items())),
                "median_s": {verb: round(s, 2) for verb, s in medians.items()},
                "kills": dict(sorted(bench.kills.items())),
                "wrong": len(bench.wrong),
            }
        )
    )
    if bench.wrong:
        print(f"state kept in {home}", file=sys.stderr)
        return 1
    shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
