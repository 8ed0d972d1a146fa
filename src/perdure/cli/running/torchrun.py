"""What torchrun's options mean here: parsed, checked, or refused with the reason.

`docs/torchrun.md` has one row for each of torchrun's options; a test compares it with the parser
of the installed torch, and with the options of `perdure run`.
"""

import os
import re
from collections.abc import Mapping

import msgspec

from perdure.model.errors import ConfigError

LOOPBACK = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0")

REFUSED = {
    "--event-log-handler": "perdure's journal is the event log: `perdure events JOB --json`",
    "--logs-specs": "streams always go to files; --log-dir says where",
    "--duplicate-stdout-filters": "streams always go to files; search them with `perdure logs`",
    "--duplicate-stderr-filters": "streams always go to files; search them with `perdure logs`",
    "--numa-binding": "perdure does not bind ranks to CPUs; use numactl with --no-python",
    "--signals-to-handle": "SIGTERM and SIGINT stop the job at an agreed step",
    "--virtual-local-rank": "LOCAL_RANK is the rank's index on its node",
}
"""Options of torchrun that perdure run does not have, and why."""


_PORT = 29500
_JOIN_S = 600.0
"""torchrun's own default of `join_timeout`."""
_DIGITS_MAX = 1000
"""Digits of a number of ranks. Python refuses to read a number of more than 4,300 digits."""


class Started(msgspec.Struct, frozen=True):
    """What a scheduler says of the step that has started this command on each of its nodes."""

    by: str
    nodes: int
    rank: int
    first: str = ""
    """Name of the first node, where the scheduler tells it."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Several nodes on which the same command is typed, and where they meet."""

    nodes_min: int
    nodes_max: int
    host: str
    """Name or address of the first node, as it was given."""
    port: int = _PORT
    rank: int | None = None
    """0 is the first node; None: that is whose address `host` is."""
    id: str = ""
    secret_file: str = ""
    join_s: float = _JOIN_S
    """How long nodes wait for one another at the start."""
    address: str = ""
    """Where others reach this node; empty: it is found."""


def read_rendezvous(
    options: Mapping[str, str | bool | None], environ: Mapping[str, str]
) -> Rendezvous | None:
    """Return where several nodes meet; None where the job is this machine's alone.

    `options` maps torchrun's options to their values, if given. A scheduler's variables are read
    only where `--nnodes` asks for several nodes, or for `auto`: whoever starts a command many times
    without it may want many jobs.

    Raises:
        ConfigError: options are wrong, or do not go together.
    """

    def get(name: str) -> str:
        return str(options.get(name) or "").strip()

    text = get("--nnodes")
    if not text:
        return None
    started = None
    if text != "auto":
        least, most = parse_nnodes(text)
        if most == 1:
            return None
        started = read_started(environ)
    else:
        started = read_started(environ)
        if started is None:
            raise ConfigError(
                "--nnodes auto: neither srun nor mpirun has started this on several nodes",
                hint="srun --ntasks-per-node=1 perdure run ..., or --nnodes N",
            )
        least = most = started.nodes
    if most == 1:
        return None
    if options.get("--standalone"):
        raise ConfigError("--standalone and --nnodes exclude one another", hint="choose one")
    rank = _parse_rank(get("--node-rank"), most)
    conf = parse_conf(get("--rdzv-conf"))
    endpoint, master = get("--rdzv-endpoint"), get("--master-addr")
    host, port = split_endpoint("--rdzv-endpoint", endpoint) if endpoint else (master, None)
    if not host and started is not None and started.first:
        host, rank = started.first, started.rank if rank is None else rank
    elif started is not None and rank is None and master and not endpoint:
        rank = started.rank
    if not host:
        raise ConfigError(
            f"--nnodes {text}: where do the nodes meet?",
            hint="--rdzv-endpoint HOST:PORT, the same on every node",
        )
    if port is None and (given := get("--master-port")) and given != "0":
        port = _parse_port("--master-port", given)
    id_ = get("--rdzv-id")
    return Rendezvous(
        nodes_min=least,
        nodes_max=most,
        host=host,
        port=port or _PORT,
        rank=rank,
        id="" if id_ == "none" else id_,  # Which is torchrun's default.
        secret_file=conf.get("secret_file", ""),
        join_s=_parse_seconds(conf),
        address=get("--local-addr"),
    )


def read_started(environ: Mapping[str, str]) -> Started | None:
    """Return what Slurm or Open MPI says of the nodes that it has started this command on.

    None where it was started by neither, or once.

    Raises:
        ConfigError: it was started several times on a node.
    """

    def count(*names: str) -> int:
        return next((int(environ[n]) for n in names if environ.get(n, "").isdecimal()), 0)

    tasks, nodes, by = 0, 0, ""
    if environ.get("SLURM_STEP_ID", "") and "SLURM_PROCID" in environ:
        tasks, by = count("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "srun"
        nodes = count("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        rank = count("SLURM_NODEID")
        first = name_first_host(environ.get("SLURM_STEP_NODELIST") or "")
    if tasks <= 1 and "OMPI_COMM_WORLD_SIZE" in environ:
        tasks, by = count("OMPI_COMM_WORLD_SIZE"), "mpirun"
        nodes = tasks if count("OMPI_COMM_WORLD_LOCAL_SIZE") <= 1 else 0
        rank, first = count("OMPI_COMM_WORLD_RANK"), ""
    if tasks <= 1:
        return None
    if tasks != nodes:
        option = "--ntasks-per-node=1" if by == "srun" else "--map-by ppr:1:node --bind-to none"
        raise ConfigError(
            f"{by} starts {tasks} tasks on {nodes or 'fewer'} nodes: perdure run itself starts the "
            "ranks of a node",
            hint=f"{by} {option}, and --nproc-per-node N",
        )
    return Started(by, nodes, rank, first)


def name_first_host(hosts: str) -> str:
    """Return the first name of one of Slurm's lists of hosts.

    >>> name_first_host("gpu[007-012,3],login1"), name_first_host("a,b"), name_first_host("")
    ('gpu007', 'a', '')
    """
    name, depth = "", 0
    for char in hosts:
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            break
        name += char
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", name)


def split_endpoint(option: str, text: str) -> tuple[str, int | None]:
    """Return the host and the port of `HOST[:PORT]`; a port of 0 is none.

    Raises:
        ConfigError: it is neither.

    >>> split_endpoint("--rdzv-endpoint", "node0:29400"), split_endpoint("", "10.0.0.1")
    (('node0', 29400), ('10.0.0.1', None))
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, ""
    if not host or ":" in host:
        raise ConfigError(f"{option} {text}: neither HOST nor HOST:PORT (IPv4)", hint="node0:29500")
    return host, (_parse_port(option, port) if port.strip("0") else None)


def _parse_port(option: str, text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"{option} {text}: not a port", hint="a number from 1 to 65535")
    return int(text)


def _parse_rank(text: str, nodes: int) -> int | None:
    if not text:
        return None
    if not (text.isdecimal() and int(text) < nodes):
        raise ConfigError(f"--node-rank {text}: not a node of {nodes}", hint=f"0 to {nodes - 1}")
    return int(text)


def parse_conf(text: str) -> dict[str, str]:
    """Return the pairs of `--rdzv-conf KEY=VALUE,...`.

    Raises:
        ConfigError: it is no such list.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if bad := next((key for key, equals, _ in pairs if not (equals and key.strip())), None):
        raise ConfigError(f"--rdzv-conf {bad}: not KEY=VALUE", hint="join_timeout=600,...")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_seconds(conf: Mapping[str, str]) -> float:
    text = conf.get("join_timeout") or conf.get("timeout") or f"{_JOIN_S:g}"
    try:
        time_s = float(text)
    except ValueError:
        time_s = 0.0
    if not 0 < time_s < 1e7:
        raise ConfigError(f"--rdzv-conf join_timeout={text}: not a time in seconds")
    return time_s


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of nodes of `--nnodes N` or `--nnodes MIN:MAX`.

    Raises:
        ConfigError: no such number or range.
    """
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise ConfigError(
            f"--nnodes {text}: neither N nor MIN:MAX nor auto", hint="--nnodes 1, or leave it out"
        )
    return numbers[0], numbers[-1]


def parse_nproc(text: str, env: Mapping[str, str]) -> int:
    """Return the ranks of a node: a number, or `auto`, `gpu`, `cpu`, counted without torch.

    Raises:
        ConfigError: none of these, or there is no GPU.
    """
    if text.isdecimal() and len(text) <= _DIGITS_MAX and int(text) > 0:
        return int(text)
    gpus = len(list_visible_gpus(env)) if text in ("auto", "gpu") else 0
    match text:
        case "gpu" if not gpus:
            raise ConfigError("-n gpu: no GPU is visible", hint="-n cpu, or a number")
        case "gpu":
            return gpus
        case "auto":
            return gpus or count_cpus()
        case "cpu":
            return count_cpus()
        case _:
            raise ConfigError(
                f"-n {text}: not a number of ranks", hint="a number from 1, auto, cpu or gpu"
            )


def count_cpus() -> int:
    """Return how many CPUs this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def list_visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the visible NVIDIA devices, by nvidia-smi and CUDA_VISIBLE_DEVICES; often none."""
    from perdure.adapters.devices import choose_visible  # Every command imports this module.
    from perdure.launch.ssh.box import query_smi

    devices = [(uuid, index) for index, uuid in query_smi("--query-gpu=index,uuid")]
    return tuple(uuid for uuid, _ in choose_visible(devices, env.get("CUDA_VISIBLE_DEVICES")))


def list_rdzv_notes(options: Mapping[str, str | bool | None]) -> list[str]:
    """Return what to say about rendezvous options; `options` maps option to value, if given.

    Raises:
        ConfigError: one of them names another machine.
    """
    for name in ("--rdzv-endpoint", "--master-addr"):
        value = str(options.get(name) or "")
        host = value.rsplit(":", 1)[0] if name == "--rdzv-endpoint" else value
        if host.strip("[]") not in LOOPBACK and host != os.uname().nodename:
            raise ConfigError(
                f"{name} {value}: without --nnodes the job is on this machine only",
                hint="--nnodes N for several nodes, or leave it out",
            )
    node_rank = options.get("--node-rank")
    if node_rank not in (None, "", "0"):
        raise ConfigError(
            f"--node-rank {node_rank}: there is one node, this machine",
            hint="--nnodes N for several nodes; --nodes K emulates several here",
        )
    ignored = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--master-addr", "--master-port")
    given = [name for name in (*ignored, "--local-addr") if options.get(name)]
    text = f"{', '.join(given)} ignored: every generation gets a store and a port of its own"
    return [text] if given else []


def parse_streams(option: str, text: str, nproc: int) -> dict[int, int]:
    """Return local rank -> 0 none, 1 out, 2 err, 3 both; of `3` or `0:1,1:3`, as torchrun.

    Raises:
        ConfigError: it is neither.
    """
    bad = ConfigError(
        f"{option} {text}: neither 0, 1, 2, 3 nor LOCAL_RANK:N,...",
        hint="1 is standard output, 2 standard error, 3 both, 0 none",
    )
    if text in ("0", "1", "2", "3"):
        return dict.fromkeys(range(nproc), int(text))
    streams = dict.fromkeys(range(nproc), 0)
    for pair in text.split(","):
        rank, _, value = pair.partition(":")
        if not rank.isdigit() or value not in ("0", "1", "2", "3"):
            raise bad
        streams[int(rank)] = int(value)
    return streams


def parse_ranks(option: str, text: str) -> frozenset[int]:
    """Return the ranks of `0,1,2`.

    Raises:
        ConfigError: it is no such list.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"{option} {text}: not a list of ranks", hint="such as 0,1,2")
    return frozenset(int(part) for part in parts)
