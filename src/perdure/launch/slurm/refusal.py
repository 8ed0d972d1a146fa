"""Whether Slurm would take a job, asked before anything is sent, and why it would not."""

from collections.abc import Mapping, Sequence

from perdure.launch.slurm.client import Slurm
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.slurm import SlurmSection, count_nodes, parse_time_limit
from perdure.model.platforms.slurm_reasons import Refusal, explain_refusal
from perdure.traps.findings import error, warning

_NAMED_MAX = 12
_LIST_S = 10
_LISTS = {
    "partition": ("partitions", "sinfo -h -o %R"),
    "account": ("your accounts", 'sacctmgr -nP show assoc user="$(id -un)" format=account'),
    "qos": ("your QOS", 'sacctmgr -nP show assoc user="$(id -un)" format=qos'),
}
"""What a person may choose from, by the setting that was wrong."""


def find_refusal(slurm: Slurm, script: str, spec: JobSpec, section: SlurmSection) -> list[Finding]:
    """Return why Slurm would not take a script, or might never start it.

    What its partition gives no job is told all the same where Slurm takes it: most clusters do, and
    a QOS may lift such limits.

    Raises:
        PlatformError: nobody answered.
    """
    said = slurm.test_submit(script)
    limits = explain_partition(slurm.read_partition(section.partition), spec, section)
    told, hint = (
        ", ".join(limits),
        "another slurm.partition, or less of it: scontrol show partition",
    )
    if not said:
        text = f"{told}: Slurm takes the job, and may never start it"
        return warning(bool(told), text, hint)
    refusal = explain_refusal(said)
    if refusal.setting == "nodes" and told:
        return error(True, f"Slurm would refuse it: {refusal.text}: {told}", hint)
    hint = add_choice(slurm, refusal, refusal.hint)
    return error(True, f"Slurm would refuse it: {refusal.text}", hint)


def add_choice(slurm: Slurm, refusal: Refusal, hint: str) -> str:
    """Return a hint with the names that a person may choose from, where the cluster tells them."""
    if refusal.setting not in _LISTS:
        return hint
    what, command = _LISTS[refusal.setting]
    names = list_names(slurm.ask(f"timeout {_LIST_S} {command} 2>/dev/null; true").out.splitlines())
    return f"{hint}; {what}: {names}" if names else hint


def list_names(rows: Sequence[str]) -> str:
    """Return names for a hint, each once, and no more than a dozen.

    >>> list_names(["lab", "", "lab", "a,b"])
    'lab, a, b'
    """
    names = list(dict.fromkeys(n for row in rows for n in row.strip().split(",") if n))
    return ", ".join(names[:_NAMED_MAX]) + (", ..." if len(names) > _NAMED_MAX else "")


def explain_partition(fields: Mapping[str, str], spec: JobSpec, section: SlurmSection) -> list[str]:
    """Return what of a partition (`scontrol show partition`) stands against a job.

    Slurm itself says at most that the node configuration is not available.
    """
    name, longest = fields.get("PartitionName", ""), fields.get("MaxTime", "")
    if not name:
        return []
    nodes, found = count_nodes(spec)[0], []
    most, there = fields.get("MaxNodes", ""), fields.get("TotalNodes", "")
    if fields.get("State", "UP") != "UP":
        found.append(f"partition {name} is {fields['State']}")
    if longest[:1].isdigit() and parse_time_limit(section.time_limit) > parse_time_limit(longest):
        found.append(f"partition {name} gives a job {longest} at most")
    if most.isdigit() and nodes > int(most):
        found.append(f"partition {name} gives a job {most} nodes at most")
    elif there.isdigit() and nodes > int(there):
        found.append(f"partition {name} has {there} nodes")
    if (who := fields.get("AllowAccounts", "ALL")) != "ALL" and section.account not in who.split(
        ","
    ):
        found.append(f"partition {name} is for accounts {who}")
    if section.account in (fields.get("DenyAccounts") or "-").split(","):
        found.append(f"partition {name} is not for account {section.account}")
    if (who := fields.get("AllowQos", "ALL")) != "ALL" and section.qos not in ("", *who.split(",")):
        found.append(f"partition {name} is for QOS {who}")
    return found
