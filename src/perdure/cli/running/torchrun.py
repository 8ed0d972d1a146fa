"""What torchrun's options mean here: parsed, checked, or refused with the reason.

`docs/torchrun.md` has one row for each of torchrun's options; a test compares it with the parser
of the installed torch, and with the options of `perdure run`.
"""

import os
from collections.abc import Mapping

from perdure.model.errors import ConfigError

LOOPBACK = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0")

REFUSED = {
    "--event-log-handler": "perdure's journal is the event log: `perdure events JOB --json`",
    "--local-addr": "one machine only: its parts speak over loopback",
    "--logs-specs": "streams always go to files; --log-dir says where",
    "--duplicate-stdout-filters": "streams always go to files; search them with `perdure logs`",
    "--duplicate-stderr-filters": "streams always go to files; search them with `perdure logs`",
    "--numa-binding": "perdure does not bind ranks to CPUs; use numactl with --no-python",
    "--signals-to-handle": "SIGTERM, SIGINT and SIGHUP stop the job at an agreed step",
    "--virtual-local-rank": "LOCAL_RANK is the rank's index on its node",
}
"""Options of torchrun that perdure run does not have, and why."""


def parse_nnodes(text: str) -> int:
    """Return the number of nodes of `--nnodes N` or `--nnodes MIN:MAX`; only 1 can be had.

    Raises:
        ConfigError: no such number or range, or more than this machine.
    """
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise ConfigError(
            f"--nnodes {text}: neither N nor MIN:MAX", hint="--nnodes 1, or leave it out"
        )
    if numbers[-1] > 1:
        raise ConfigError(
            f"--nnodes {text}: perdure run starts a job on this machine only",
            hint=f"--nodes {numbers[-1]} emulates that many nodes here, each with its own agent",
        )
    return 1


def parse_nproc(text: str, env: Mapping[str, str]) -> int:
    """Return the ranks of a node: a number, or `auto`, `gpu`, `cpu`, counted without torch.

    Raises:
        ConfigError: none of these, or there is no GPU.
    """
    if text.isdigit() and int(text) > 0:
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
                f"{name} {value}: perdure run starts a job on this machine only",
                hint="leave it out; perdure makes the rendezvous itself",
            )
    node_rank = options.get("--node-rank")
    if node_rank not in (None, "", "0"):
        raise ConfigError(
            f"--node-rank {node_rank}: there is one node, this machine",
            hint="--nodes K emulates several nodes here",
        )
    ignored = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--master-addr", "--master-port")
    given = [name for name in ignored if options.get(name)]
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
