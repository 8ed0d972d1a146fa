"""One fault in a running job, and whether what the detector said of it is right."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.lab.job import LabJob, Row

HANGS = ("stop", "spin", "sleep", "gil")
SLOW_STAGES = ("slow-forward", "slow-backward", "slow-data")
DEATHS = ("crash", "exit")
LINKS = ("slow-link", "drop-link")
DESYNCS = ("wrong-op", "wrong-size")
ENDS_ITSELF = ("stop", "gil")
"""No order reaches the rank while it lasts, so it ends after `for_s`."""
RESTARTS = (*DEATHS, *DESYNCS)
SETTLE_S = 1.0
"""After a verdict, for a better one to replace it."""
QUIET_S = 2.5
QUIET_S_MAX = 60.0


@dataclass(frozen=True)
class Fault:
    """What is done, and to whom."""

    kind: str
    rank: int
    args: dict[str, float] = field(default_factory=dict)
    link: tuple[int, int] | None = None
    """From rank to rank, of a fault of a link."""
    patience_s: float = 30.0
    """How long a verdict is waited for."""
    mended: bool = False
    """Whether a link that is down is brought up again once the right verdict is there."""


@dataclass
class Outcome:
    """What came of it."""

    kind: str = "none"
    """Of the verdict that stood at the end."""
    culprit: str = "none"
    stage: str = ""
    kind_right: bool = False
    culprit_right: bool = False
    confirm_s: float = -1.0
    """From the fault to the first right verdict; -1 without one."""
    took_s: float = -1.0
    """From what was seen first to that verdict, as it says itself."""
    passing: list[str] = field(default_factory=list)
    """Wrong verdicts beside or before it."""
    after: list[str] = field(default_factory=list)
    """New verdicts once it was over."""
    ratio: float = 0.0
    """Step time over the usual one, as the verdict says."""
    quiet_s: float = 0.0
    """From the fault's end until nothing was blamed any more."""
    lingers: list[str] = field(default_factory=list)
    """Verdicts that were not withdrawn within `QUIET_S_MAX`."""
    last: list[str] = field(default_factory=list)
    """What the journal says of that time."""
    allowed: str = ""
    evidence: Row = field(default_factory=dict)
    """Of a verdict that was wrong."""
    reason: str = ""

    def as_row(self) -> Row:
        """Return it as JSON would have it."""
        return asdict(self)


def name_culprit(culprit: Row) -> str:
    """Return a culprit in words: `rank 1`, `node 0`, `link 0->1`."""
    if culprit.get("link"):
        return "link {}->{}".format(*culprit["link"])
    for word in ("rank", "node"):
        if culprit.get(word) is not None:
            return f"{word} {culprit[word]}"
    return "nobody"


def judge(fault: Fault, verdict: Row, per_node: int) -> tuple[bool, bool]:
    """Return whether a verdict's kind is right, and its culprit."""
    kind, culprit = verdict["kind"], name_culprit(verdict["culprit"])
    node = fault.rank // per_node
    rank = culprit == f"rank {fault.rank}"
    alone = per_node == 1 and culprit == f"node {node}"
    link = verdict["culprit"].get("link") or (-1, -1)
    ends = tuple(r // per_node for r in link)
    if fault.kind in HANGS:
        return kind == "ComputeHang", rank
    if fault.kind in SLOW_STAGES or fault.kind in ("slow", "memory"):
        return kind == "Straggler", rank or alone
    if fault.kind in DEATHS:
        return kind == "Crash", rank
    if fault.kind in DESYNCS:
        # gloo itself refuses most wrong sizes, and the rank dies of the exception.
        return kind == "Desync" or (kind == "Crash" and fault.kind == "wrong-size"), rank
    if fault.kind == "link-down":
        return kind in ("NodeLost", "CommHang"), culprit == f"node {node}" or node in ends
    wanted = fault.link or (-1, -1)
    right = ends == (wanted[0] // per_node, wanted[1] // per_node)
    return kind == ("CommSlow" if fault.kind == "slow-link" else "CommHang"), right


def run_episode(job: LabJob, fault: Fault) -> Outcome:
    """Harm the job, wait for the verdict and for quiet; return what came of it."""
    job.journal.read()
    generation = max((b["generation"] for b in job.journal.find("RanksStarted")), default=0)
    since = len(job.journal.entries)
    told = job.inject(fault.kind, fault.rank, **fault.args)
    outcome = Outcome()
    _collect(job, fault, told["at_s"], since, outcome)
    end = len(job.journal.entries)
    ended = time.monotonic()
    if fault.kind in RESTARTS:
        if outcome.kind_right:
            job.wait_training(generation + 1)
    elif fault.mended and outcome.kind_right:
        job.heal_link(fault.rank)
    elif fault.kind in ENDS_ITSELF or fault.kind == "link-down":
        left_s = fault.args["for_s"] - (_now(job) - told["at_s"])
        job.wait(lambda: False, max(0.0, left_s))
    elif fault.kind != "memory" or job.journal.open:
        job.inject("heal", fault.rank)
    if not wait_quiet(job):
        outcome.lingers = [f"{v['kind']}: {v['reason']}" for v in job.journal.open.values()]
        outcome.last = [e["body"]["type"] for e in job.journal.entries[end:]][-30:]
    outcome.quiet_s = round(time.monotonic() - ended, 2)
    for body in job.journal.find("VerdictReached", end):
        v = body["verdict"]
        right = all(judge(fault, v, job.world // job.lab.nodes))
        if v["confirmed_s"] > told["at_s"] and not v["actionable"] and not right:
            outcome.after.append(f"{v['kind']} of {name_culprit(v['culprit'])}")
    return outcome


def wait_quiet(job: LabJob) -> bool:
    """Wait until nothing is blamed, and was not for a while; return whether it came to that."""
    deadline = time.monotonic() + QUIET_S_MAX
    quiet = time.monotonic()
    while time.monotonic() < deadline and job.process.poll() is None:
        job.journal.read()
        if job.journal.open:
            quiet = time.monotonic()
        if time.monotonic() - quiet >= QUIET_S:
            return True
        time.sleep(0.1)
    return False


def _now(job: LabJob) -> float:
    """Return job time, by the journal's newest entry at least."""
    return float(job.journal.entries[-1]["at_s"])


def _collect(job: LabJob, fault: Fault, at_s: float, since: int, outcome: Outcome) -> None:
    """Wait for the right verdict, a little longer for a better one, and note all that was said."""
    per_node = job.world // job.lab.nodes

    def seen() -> list[Row]:
        bodies = job.journal.find("VerdictReached", since)
        found = [b["verdict"] for b in bodies if not b["verdict"]["actionable"]]
        derived = job.journal.find("RankExited", since) or job.journal.find("NodeLost", since)
        return [*found, *_find_derived(job, since)] if derived else found

    def right() -> bool:
        return any(all(judge(fault, v, per_node)) for v in seen())

    if not job.wait(right, fault.patience_s) and job.process.poll() is not None:
        outcome.reason = "the job ended"
    if fault.kind not in RESTARTS:
        job.wait(lambda: False, SETTLE_S)
    verdicts = [v for v in seen() if v["confirmed_s"] >= at_s - 0.5]
    good = [v for v in verdicts if all(judge(fault, v, per_node))]
    standing = [v for v in job.journal.open.values() if v["confirmed_s"] >= at_s - 0.5]
    last = (standing or verdicts or [None])[-1]
    if good and (fault.kind in RESTARTS or fault.kind in ("stop", "gil")):
        last = good[0]  # It may be over, and withdrawn, by now.
    if good:
        outcome.confirm_s = round(good[0]["confirmed_s"] - at_s, 3)
        outcome.took_s = good[0]["confirmed_s"] - good[0]["first_seen_s"]
    if last is not None:
        outcome.kind, outcome.culprit = last["kind"], name_culprit(last["culprit"])
        outcome.kind_right, outcome.culprit_right = judge(fault, last, per_node)
        evidence: dict[str, Any] = last.get("evidence", {})
        outcome.stage = str(evidence.get("stage", ""))
        outcome.ratio = float(evidence.get("step_ratio", 0.0))
        outcome.allowed = str(evidence.get("allowed_for", ""))
        outcome.reason = str(last.get("reason", ""))[:200]
        if not (outcome.kind_right and outcome.culprit_right):
            outcome.evidence = evidence
    wrong = [v for v in verdicts if not all(judge(fault, v, per_node))]
    if last is not None:
        wrong = [v for v in wrong if (v["kind"], v["culprit"]) != (last["kind"], last["culprit"])]
    outcome.passing = [f"{v['kind']} of {name_culprit(v['culprit'])}" for v in wrong]


def _find_derived(job: LabJob, since: int) -> list[Row]:
    """Return crashes and lost nodes, which no detector says: they are folded from the journal."""
    entries = list(read_mirror(paths_of(job.env["PERDURE_HOME"], job.name)) or ())
    found = list_verdicts(entries[since:])
    return [
        {
            "kind": v.kind,
            "culprit": {"rank": v.culprit.rank, "node": v.culprit.node},
            "confirmed_s": v.confirmed_s,
            "first_seen_s": v.first_seen_s,
            "reason": v.reason,
        }
        for v in found
        if v.kind in ("Crash", "NodeLost")
    ]
