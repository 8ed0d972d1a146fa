"""Whether a trap lies ahead on this machine: facts in, a state and its evidence out.

A check returns None where it has nothing to look at, such as GPUs where there are none.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from perdure.model.platforms.box import BoxFacts, Disk

State = Literal["ok", "degraded", "note"]
Verdict = tuple[State, str] | None

FREE_MIN = 20 << 30
INODES_MIN = 100_000
SHARE_MIN = 0.05
"""The share of a disk's bytes or inodes below which it counts as full."""
FLEETING = ("/tmp", "/var/tmp", "/dev/shm", "/run")
MEMORY_SHARE_MAX = 0.85
_SEVERS = ("tmux", "screen", "systemd", "slurmstepd", "dtach", "perdure")


def _rate(bad: object, text: str, well: str = "", state: State = "degraded") -> Verdict:
    """Return a verdict with its evidence: `text`, or what is `well` in words of its own."""
    return (state, text) if bad else ("ok", well or text)


def check_bytes(facts: BoxFacts) -> Verdict:
    """U6: torch.save dies on a full disk."""
    disks = [d for d in facts.disks if d.total and d.role != "shared memory"]
    low = [d for d in disks if d.free < FREE_MIN or d.free < SHARE_MIN * d.total]
    return _tell(disks, low, lambda d: f"{d.role} {d.path}: {d.free / 2**30:.1f} GiB free")


def check_inodes(facts: BoxFacts) -> Verdict:
    """U7: inodes run out before bytes."""
    disks = [d for d in facts.disks if d.inodes]
    low = [d for d in disks if d.inodes_free < min(INODES_MIN, SHARE_MIN * d.inodes)]
    return _tell(disks, low, lambda d: f"{d.role} {d.path}: {d.inodes_free:,} inodes free")


def _tell(disks: list[Disk], low: list[Disk], say: Callable[[Disk], str]) -> Verdict:
    return _rate(low, "; ".join(dict.fromkeys(map(say, low or disks)))) if disks else None


def check_memory(facts: BoxFacts) -> Verdict:
    """U9: loader workers times big tensors, and the kernel kills."""
    used, limit = facts.memory_used, facts.memory_limit
    text = f"{used / 2**30:.1f} of {limit / 2**30:.1f} GiB used"
    return _rate(used > MEMORY_SHARE_MAX * limit, text) if limit else None


def check_allocator(facts: BoxFacts) -> Verdict:
    """U10: a GPU's memory is fragmented rather than full."""
    found = facts.env.get("PYTORCH_CUDA_ALLOC_CONF") or facts.env.get("PYTORCH_ALLOC_CONF") or ""
    lacks, well = "expandable_segments is not set", f"PYTORCH_CUDA_ALLOC_CONF={found}"
    return _rate("expandable_segments" not in found, lacks, well, "note") if facts.gpus else None


def check_shared_gpu(facts: BoxFacts) -> Verdict:
    """GEN7: another run is on the card already."""
    taken = [f"{g.uuid}: pid {', '.join(map(str, g.pids))}" for g in facts.gpus if g.pids]
    return _rate(taken, "; ".join(taken), "no process on any GPU") if facts.gpus else None


def check_line_ends(facts: BoxFacts) -> Verdict:
    """U26, GEN4: scripts whose lines end as on Windows."""
    text = ", ".join(facts.crlf[:5]) + (" ..." if len(facts.crlf) > 5 else "")
    return _rate(facts.crlf, text, "no script with CRLF in the project")


def check_cuda(facts: BoxFacts) -> Verdict:
    """U28: a driver older than the CUDA that torch was built with."""
    if not facts.torch_cuda or not facts.driver_cuda:
        return None
    text = f"torch was built with CUDA {facts.torch_cuda}, the driver runs {facts.driver_cuda}"
    # Within a major version, an older driver runs a newer toolkit's code.
    return _rate(_version(facts.torch_cuda)[:1] > _version(facts.driver_cuda)[:1], text)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def check_gpu_visible(facts: BoxFacts) -> Verdict:
    """U31, K8S6, NB3: a build for GPUs that would train on the CPU."""
    if not facts.torch_cuda and not facts.gpu_nodes:
        return None
    if facts.gpus:
        return "ok", f"{len(facts.gpus)} GPUs by NVML, torch for CUDA {facts.torch_cuda or '-'}"
    if facts.gpu_nodes and not facts.torch_cuda:
        return "degraded", f"{facts.gpu_nodes} GPUs, and torch {facts.torch} cannot use them"
    hidden = facts.env.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "none is visible"
    return "degraded", f"torch for CUDA {facts.torch_cuda}, but no GPU: {why}"


def check_oom_counter(facts: BoxFacts) -> Verdict:
    """U41: `free` tells of the machine, the cgroup counts its own kills."""
    if facts.oom_kills is None:
        return "degraded", "no counter of OOM kills can be read: one looks like any SIGKILL"
    text = f"the kernel has killed {facts.oom_kills} times for want of memory here"
    return _rate(facts.oom_kills, text, "no kill for want of memory in this cgroup", "note")


def check_system(facts: BoxFacts) -> Verdict:
    """U44: spawn on Windows imports the script again."""
    text = f"{facts.system}: perdure runs on Linux only"
    return _rate(facts.system != "Linux", text, "Linux: ranks are forked")


def check_fabric(facts: BoxFacts) -> Verdict:
    """MN1: without the fabric manager every collective over NVSwitch hangs."""
    if not facts.nvswitch:
        return None
    if facts.fabric_manager:
        return "ok", "NVSwitch, and nv-fabricmanager runs"
    return "degraded", "there is an NVSwitch, and no nv-fabricmanager is seen"


def check_hangup(facts: BoxFacts) -> Verdict:
    """GEN2: what is started here dies with the connection."""
    for name in facts.ancestors:
        if name.startswith(_SEVERS):
            break
        if name.startswith("sshd"):
            return "degraded", f"below {name}: what runs in the foreground dies with it"
    below = any(name.startswith("sshd") for name in facts.ancestors)
    return "ok", f"below {name}" if below else "not below an SSH connection"


def check_transfer_tool(facts: BoxFacts) -> Verdict:
    """GEN3, U12: scp starts from zero."""
    text = "no rsync here: nothing can be pulled or pushed"
    return _rate(not facts.rsync, text, "rsync is there", "note")


def check_slurm_signal(facts: BoxFacts) -> Verdict:
    """SLURM2: without preempt_send_user_signal a preemption warns nobody."""
    if not facts.slurm:
        return None
    if facts.slurm.get("PreemptType", "preempt/none") == "preempt/none":
        return "ok", "no preemption on this cluster"
    found = facts.slurm.get("SlurmctldParameters", "")
    text = f"KillWait {facts.slurm.get('KillWait', '?')}, SlurmctldParameters {found or '(none)'}"
    return _rate("preempt_send_user_signal" not in found, text, state="note")


def check_slurm_requeue(facts: BoxFacts) -> Verdict:
    """SLURM2: a cluster that allows no requeue ends the chain."""
    allowed = facts.slurm.get("JobRequeue", "1")
    return _rate(allowed == "0", f"JobRequeue {allowed}") if facts.slurm else None


def check_slurm_accounting(facts: BoxFacts) -> Verdict:
    """SLURM4: without accounting sacct tells nothing of an OOM kill."""
    kind = facts.slurm.get("AccountingStorageType", "")
    mute = not kind or kind.endswith("/none") or kind == "(null)"
    return _rate(mute, f"AccountingStorageType {kind or '?'}", "", "note") if facts.slurm else None


def check_durable(facts: BoxFacts) -> Verdict:
    """NB4: checkpoints on a place that is wiped."""
    fleeting = (*FLEETING, *(filter(None, [facts.env.get("TMPDIR", "")])))
    places = [d for d in facts.disks if d.role in ("state", "checkpoints")]
    bad = [d for d in places if d.kind in ("tmpfs", "overlay") or is_below(d.path, fleeting)]
    names = ", ".join(dict.fromkeys(d.path for d in bad or places))
    text = f"{names}: wiped at the end of a job, pod or boot"
    return _rate(bad, text, names, "note") if places else None


def check_job_scratch(facts: BoxFacts) -> Verdict:
    """SLURM5: checkpoints in a job's own scratch; without Slurm nobody wipes it so."""
    return check_durable(facts) if facts.slurm else None


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Return whether a path is one of some folders, or in one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def check_files(facts: BoxFacts) -> Verdict:
    """Check that there are descriptors enough for a full mesh of gloo."""
    return _rate(facts.open_files < 4096, f"{facts.open_files} open files")
