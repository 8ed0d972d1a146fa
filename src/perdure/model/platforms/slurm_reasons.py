"""Slurm's reasons in words: why it refuses a job, and what a job in its queue waits for."""

import re
from typing import NamedTuple

_PREFIX = re.compile(
    r"^(?:\w+: )?(?:(?:error|fatal): )?(?:allocation failure: |Batch job submission failed: )?"
)
_NEVER = "it will not start as it is"
_OTHERS = "it waits for others to end, and for ever where it asks for more by itself"
_WITHOUT = "it waits until there are more"
_WAITS = {
    "Resources": "it is next, and its nodes are taken",
    "Priority": "others of its partition come first",
    "BeginTime": "its time has not come; a job that was put back waits for a while",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": f"{_NEVER}: what it depends on has not ended as slurm.dependency "
    "has it",
    "Licenses": "its licenses are in use",
    "Cleaning": "what its run before has left is being removed",
    "JobArrayTaskLimit": "as many tasks of its array run as slurm.array allows",
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "Nodes_required_for_job_are_DOWN": "nodes that it could have are down, drained or reserved",
    "NodeDown": "a node that it asks for is down",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": f"{_NEVER}: its reservation is gone",
    "JobHeldUser": f"{_NEVER}: its user holds it (scontrol release)",
    "JobHeldAdmin": f"{_NEVER}: an administrator holds it",
    "job_requeued_in_held_state": f"{_NEVER}: it was put back and held (scontrol release)",
    "launch_failed_requeued_held": f"{_NEVER}: it could not be started on its nodes, was put back "
    "and held (scontrol release)",
    "PartitionDown": "its partition takes jobs, and starts none at present",
    "PartitionInactive": "its partition is closed at present",
    "PartitionNodeLimit": f"{_NEVER}: its partition gives no job so many nodes, or so few",
    "PartitionTimeLimit": f"{_NEVER}: slurm.time_limit is above that of its partition",
    "BadConstraints": f"{_NEVER}: no node is as slurm.constraint, mem and gres ask for",
    "AccountNotAllowed": f"{_NEVER}: its partition is not for this account",
    "InvalidAccount": f"{_NEVER}: Slurm does not know its account",
    "QOSNotAllowed": f"{_NEVER}: its account or partition is not for this QOS",
    "InvalidQOS": f"{_NEVER}: Slurm does not know its QOS",
    "QOSUsageThreshold": "its QOS has used what it may",
    "SystemFailure": "Slurm, a file system or the network has failed",
}
_MEASURES = (
    ("cpurunmin", "core-minutes of jobs that run"),
    ("cpumin", "core-minutes"),
    ("gresrunmin", "device-minutes of jobs that run"),
    ("gresmin", "device-minutes"),
    ("submit", "jobs in the queue"),
    ("jobs", "jobs at a time"),
    ("wall", "time"),
    ("time", "time"),
    ("cpu", "cores"),
    ("mem", "memory"),
    ("gres", "devices"),
    ("node", "nodes"),
)


class Refusal(NamedTuple):
    """Why Slurm would not take a job."""

    text: str
    setting: str = ""
    """What of the profile is meant: `partition`, `account`, `qos`, ...; empty where unknown."""
    hint: str = ""


_LIMITS = "less of it, or another slurm.qos or slurm.account; sacctmgr show qos, show assoc"
_REFUSALS = (
    ("policy", "limit", _LIMITS),
    ("Invalid account", "account", "slurm.account"),
    ("Invalid qos", "qos", "slurm.qos"),
    ("nvalid partition", "partition", "slurm.partition"),
    ("node configuration is not", "nodes", "cores, mem and gres of a node: sinfo -N -l"),
    ("Invalid feature", "constraint", "slurm.constraint; sinfo -o '%f' lists features"),
    ("Invalid node name", "extra", "--nodelist in slurm.extra; sinfo -N lists nodes"),
    ("array spec", "array", "slurm.array; scontrol show config: MaxArraySize"),
    ("time limit", "time_limit", "slurm.time_limit"),
    ("--time spec", "time_limit", "slurm.time_limit"),
    ("dependency", "dependency", "slurm.dependency, such as afterok:123"),
    ("gres", "gres", "slurm.gres; sinfo -o '%G' lists devices"),
)
_SILENT = ("contact slurm controller", "timed out", "Zero Bytes", "Connection refused")


def extract_reason(said: str) -> str:
    """Return the first thing that one of Slurm's commands complains of; the rest repeats it.

    >>> extract_reason("sbatch: error: invalid partition specified: x")
    'invalid partition specified: x'
    """
    line = next((line.strip() for line in said.splitlines() if line.strip()), "")
    return _PREFIX.sub("", line) or "it gives no reason"


def explain_refusal(said: str) -> Refusal:
    """Return why Slurm refuses a job, by what sbatch has written.

    >>> explain_refusal("sbatch: error: invalid partition specified: x").setting
    'partition'
    """
    first = extract_reason(said)
    if told := _explain_limit(first)[0]:
        return Refusal(f"{first}: {told}", "limit", _LIMITS)
    for mark, setting, hint in _REFUSALS:
        if mark in said:
            return Refusal(first, setting, hint)
    return Refusal(first, "", "sinfo; the profile's [slurm]")


def is_silent(said: str) -> bool:
    """Return whether a command's complaint is that nobody has answered it: no refusal."""
    return any(mark in said for mark in _SILENT)


def explain_reason(reason: str) -> str:
    """Return why a job waits: Slurm's own word, and what it means; empty where it says none.

    >>> explain_reason("ReqNodeNotAvail,_UnavailableNodes:n1")
    'ReqNodeNotAvail (UnavailableNodes:n1): nodes that it asks for are down, drained or reserved'
    """
    word, _, more = reason.strip("()").partition(",")
    told = _WAITS.get(word) or "; ".join(filter(None, _explain_limit(word)))
    if not told:
        return reason
    more = more.strip("_ ")
    return f"{word} ({more}): {told}" if more.startswith("Unavail") else f"{word}: {told}"


def _explain_limit(word: str) -> tuple[str, str]:
    """Return what a limit of an account or a QOS is, and what follows; empty where it is none."""
    match = re.fullmatch(r"(Assoc|QOS)(Grp|Max|Min)(\w+)", word)
    if match is None:
        return "", ""
    whose = {"Assoc": "account", "QOS": "QOS"}[match[1]]
    key = match[3].lower()
    what = next((name for part, name in _MEASURES if part in key), match[3])
    if match[2] == "Min":
        return f"its {whose} wants more of a job ({what})", _NEVER
    if "perjob" in key or "pernode" in key:
        return f"its {whose} gives no job so much ({what})", _NEVER
    if "minutes" in what:
        return f"its {whose} has too few left ({what})", _WITHOUT
    each = "all jobs of a user" if "peruser" in key else "all jobs"
    return f"{each} in its {whose} have as much together as they may ({what})", _OTHERS
