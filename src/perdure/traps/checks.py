"""Whether a trap lies ahead on this machine: facts in, a state and its evidence out.

A check returns None where it has nothing to look at, such as GPUs where there are none.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from perdure.model.nccl import explain_breaking
from perdure.model.platforms.box import NETWORK_KINDS, BoxFacts, Disk

State = Literal["ok", "degraded", "note"]
Verdict = tuple[State, str] | None

FREE_MIN = 20 << 30
INODES_MIN = 100_000
SHARE_MIN = 0.05
"""The share of a disk's bytes or inodes below which it counts as full."""
FLEETING = ("/tmp", "/var/tmp", "/dev/shm", "/run")
MEMORY_SHARE_MAX = 0.85
FILES_MANY = 100_000
HOLDER_AGE_S = 120.0
_SEVERS = ("tmux", "screen", "systemd", "slurmstepd", "dtach", "perdure")
_EPOCH_MIN_S = 1_704_067_200.0
"""2024: a clock before it was never set."""


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


def check_hot_data(facts: BoxFacts) -> Verdict:
    """U8: batches are read over a network or from a turning disk."""
    disks = [d for d in facts.disks if d.role == "project"]
    slow = next((d for d in disks if d.kind in NETWORK_KINDS or d.rotational), None)
    if slow is not None:
        kind = "a network file system" if slow.kind in NETWORK_KINDS else "a turning disk"
        return "note", f"{slow.path} is on {kind} ({slow.kind})"
    well = "the project is on a local disk without moving parts, as far as it tells"
    return ("ok", well) if disks else None


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


def check_zombies(facts: BoxFacts) -> Verdict:
    """U11: memory of a GPU is held by a process that NVML does not show."""
    if not facts.gpu_nodes:
        return None
    shown = {pid for gpu in facts.gpus for pid in gpu.pids}
    hidden = [h for h in facts.holders if h.pid not in shown and h.age_s > HOLDER_AGE_S]
    lost = next((g for g in facts.gpus if g.used > 2 << 30 and not g.pids), None)
    if lost is None:
        return "ok", f"{len(facts.holders)} holders, all of them known to NVML or young"
    text = f"{lost.used >> 20} MiB of {lost.uuid} belong to nobody"
    names = ", ".join(f"pid {h.pid} ({h.name}) on {h.device}" for h in hidden)
    return "degraded", f"{names}; {text}" if hidden else f"{text} seen here"


def check_shared_gpu(facts: BoxFacts) -> Verdict:
    """GEN7: another run is on the card already."""
    taken = [f"{g.uuid}: pid {', '.join(map(str, g.pids))}" for g in facts.gpus if g.pids]
    return _rate(taken, "; ".join(taken), "no process on any GPU") if facts.gpus else None


def check_many_files(facts: BoxFacts) -> Verdict:
    """U25: a data set of small files."""
    count = facts.project_files
    text = f"{count:,} files in the project"
    return _rate(count >= FILES_MANY, f"at least {text}", text, "note") if count else None


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


def check_lock_file(facts: BoxFacts) -> Verdict:
    """U29: nothing pins the packages."""
    return _rate(not facts.lock_file, "no lock file in the project", facts.lock_file, "note")


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


def check_secrets(facts: BoxFacts) -> Verdict:
    """U34: credentials that others can read."""
    text = f"others may read {', '.join(facts.readable_secrets)}"
    return _rate(facts.readable_secrets, text, "no file of credentials that others may read")


def check_tracker(facts: BoxFacts) -> Verdict:
    """U35: wandb without a key records nothing that anybody sees."""
    if "wandb" not in facts.packages:
        return None
    if facts.env.get("WANDB_MODE") in ("disabled", "offline"):
        return "note", f"WANDB_MODE={facts.env['WANDB_MODE']}"
    known = "WANDB_API_KEY" in facts.env or ".netrc" in facts.env.get("files", "")
    lacks = "wandb is installed, and neither WANDB_API_KEY nor ~/.netrc is there"
    return _rate(not known, lacks, "a key is there", "note")


def check_threads(facts: BoxFacts) -> Verdict:
    """U40: more threads than the cgroup grants cores."""
    if facts.cpu_quota is None or facts.cpu_quota >= facts.cpus:
        return "ok", f"{facts.cpus} CPUs and no quota below them"
    asked = facts.env.get("OMP_NUM_THREADS", "")
    few = asked.isdigit() and int(asked) <= facts.cpu_quota
    text = f"{facts.cpus} CPUs are seen, {facts.cpu_quota:g} are granted"
    return _rate(not few, f"{text}; OMP_NUM_THREADS={asked or 'is not set'}")


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


def check_nccl(facts: BoxFacts) -> Verdict:
    """U45: a variable of NCCL that ends the survivors of an elastic world."""
    if not facts.gpu_nodes:
        return None
    found = explain_breaking(facts.env)
    well = "no variable of NCCL that keeps an elastic world from recovering"
    return _rate(found, f"in an elastic world, {'; '.join(found)}", well, "note")


def check_instances(facts: BoxFacts) -> Verdict:
    """U47: NCCL takes MIG instances of one GPU for one GPU."""
    if not facts.gpus:
        return None
    divided = [f"{g.uuid} into {len(g.instances)}" for g in facts.gpus if len(g.instances) > 1]
    text = f"divided: {', '.join(divided)}; NCCL joins instances of one GPU from 2.30 on only"
    return _rate(divided, text, "no GPU is divided into several instances", "note")


def check_mps(facts: BoxFacts) -> Verdict:
    """U48: under MPS what ends one process of a GPU ends all of them."""
    if not facts.gpus and not facts.gpu_nodes:
        return None
    pipe = facts.env.get("CUDA_MPS_PIPE_DIRECTORY", "")
    signs = [f"CUDA_MPS_PIPE_DIRECTORY={pipe}"] * bool(pipe) + ["its daemon runs"] * facts.mps
    text = f"MPS: {', '.join(signs)}; an error of one process ends all that share its GPU"
    return _rate(signs, text, "no sign of MPS", "note")


def check_fabric(facts: BoxFacts) -> Verdict:
    """MN1: without the fabric manager every collective over NVSwitch hangs."""
    if not facts.nvswitch:
        return None
    if facts.fabric_manager:
        return "ok", "NVSwitch, and nv-fabricmanager runs"
    return "degraded", "there is an NVSwitch, and no nv-fabricmanager is seen"


def check_interface(facts: BoxFacts) -> Verdict:
    """MN2: of several interfaces the wrong one is taken."""
    names = [nic.name for nic in facts.nics]
    chosen = {k: v for k, v in facts.env.items() if k.endswith("_SOCKET_IFNAME")}
    if len(names) < 2:
        return "ok", f"one interface: {names[0]}" if names else "no interface but loopback"
    if chosen:
        return "ok", ", ".join(f"{k}={v}" for k, v in sorted(chosen.items()))
    return "note", f"{', '.join(names)} are up; neither NCCL_ nor GLOO_SOCKET_IFNAME is set"


def check_mtu(facts: BoxFacts) -> Verdict:
    """MN4: interfaces of different frame size on one path."""
    text = ", ".join(f"{nic.name} {nic.mtu}" for nic in facts.nics) or "no interface but loopback"
    return _rate(len({nic.mtu for nic in facts.nics}) > 1, text, state="note")


def check_hangup(facts: BoxFacts) -> Verdict:
    """GEN2: what is started here dies with the connection."""
    for name in facts.ancestors:
        if name.startswith(_SEVERS):
            break
        if name.startswith("sshd"):
            return "degraded", f"below {name}: what runs in the foreground dies with it"
    below = any(name.startswith("sshd") for name in facts.ancestors)
    return "ok", f"below {name}" if below else "not below an SSH connection"


def check_linger(facts: BoxFacts) -> Verdict:
    """GEN2: systemd ends what a user leaves behind, tmux as well."""
    if facts.kill_user_processes is None:
        return None
    dies = "KillUserProcesses=yes: tmux dies at logout"
    return _rate(facts.kill_user_processes, dies, "KillUserProcesses=no, or lingering is on")


def check_detach_tool(facts: BoxFacts) -> Verdict:
    """GEN2: nothing to sever the job from the connection with."""
    found = sorted({"tmux", "setsid", "systemd-run"} & facts.tools)
    return _rate(not found, "neither tmux nor setsid", ", ".join(found))


def check_transfer_tool(facts: BoxFacts) -> Verdict:
    """GEN3, U12: scp starts from zero."""
    text = "no rsync here: nothing can be pulled or pushed"
    return _rate("rsync" not in facts.tools, text, "rsync is there", "note")


def check_clock(facts: BoxFacts) -> Verdict:
    """Check that the clock was set: an unset one breaks TLS, and makes mtimes lie."""
    if facts.clock_s < _EPOCH_MIN_S:
        return "degraded", "the clock was never set"
    if facts.clock_synced is None:
        return None
    text = "the kernel does not know its clock to be synchronized"
    return _rate(not facts.clock_synced, text, "the kernel's clock is synchronized", "note")


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
