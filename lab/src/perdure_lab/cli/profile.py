"""`perdure profile`: what a script's model and this machine cost, measured by the script itself."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.speech.say import Json, answer, check_writable, hear_stop, note, render_table
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError, PerdureError, PlatformError
from perdure.model.planning.costs import (
    ASK,
    LINKS,
    PLACES,
    CostProfile,
    Meeting,
    ProfileReport,
    ProfileRequest,
    read_profile,
)
from perdure.service.jobfolders import resolve_home
from perdure.worker.system.process import die_with

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}
"""What follows the script is the script's."""


def profile(
    script: Annotated[
        Path,
        typer.Argument(help="A Python file that calls perdure.elastic.train with blocks=[...]."),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch",
            min=1,
            help="Samples; repeatable. Default: the script's, half and double.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes of the largest group that is measured.")
    ] = 8,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Least seconds per micro-batch size.")
    ] = 2.0,
    again: Annotated[
        bool, typer.Option("--again", help="Measure also what was measured before.")
    ] = False,
    nnodes: Annotated[
        int | None,
        typer.Option("--nnodes", min=1, help="Nodes on which you type this; measures links too."),
    ] = None,
    node_rank: Annotated[
        str | None,
        typer.Option("--node-rank", help="With --nnodes: 0 is first; else --rdzv-endpoint says."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint", metavar="HOST[:PORT]", help="With --nnodes: where node 0 listens."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the profile here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a model's blocks and links cost, for `plan`.

    Runs SCRIPT until it calls perdure.elastic.train, which measures and does not train. Earlier
    figures of the same model on the same machine stay. With --nnodes, type the command on every
    node; the first one has the profile.
    """
    if not script.is_file():
        raise ConfigError(f"no such script: {script}")
    check_writable(out)
    hear_stop()
    meeting, is_first = _meet(nnodes or 1, node_rank, rdzv_endpoint)
    if meeting is not None and not is_first:
        _join(meeting, as_json=as_json)
        return
    request = ProfileRequest(
        folder=str(Path(resolve_home(), "costs")),
        report="",
        model=script.name,
        micro_batches=tuple(sorted(set(micro_batch or ()))),
        ranks=ranks,
        seconds=seconds,
        again=again,
        meeting=meeting,
    )
    _tell(_run(script, args or [], request), out, as_json=as_json)


def _tell(report: ProfileReport, out: Path | None, *, as_json: bool) -> None:
    for text in report.notes:
        note(text)
    if out is not None:
        copyfile(report.path, out)
    found = read_profile(Path(report.path).read_text(encoding="utf-8"), report.path)
    costs = {**msgspec.to_builtins(report), "fingerprint": found.fingerprint}
    document = {name: costs[name] for name in costs if name not in ("error", "hint")}
    answer(document, _render(found, report), as_json=as_json)


def _meet(nodes: int, rank: str | None, endpoint: str | None) -> tuple[Meeting | None, bool]:
    """Return where several nodes meet, None for one; and whether this is the first one."""
    from perdure.cli.running.nodes import find_place
    from perdure.cli.running.torchrun import read_rendezvous
    from perdure.launch.ssh.box import list_interfaces

    options = {"--nnodes": str(nodes), "--node-rank": rank, "--rdzv-endpoint": endpoint}
    met = read_rendezvous(options, os.environ)
    if met is None:
        return None, True
    place = find_place(met)
    names = {address: name for name, address in list_interfaces()}
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or names.get(place.mine, "lo")
    return Meeting(met.nodes_max, place.address, met.port, interface, met.join_s), place.first


def _join(meeting: Meeting, *, as_json: bool) -> None:
    """Measure the links with the first node, and say so.

    Raises:
        PlatformError: it did not come to that.
    """
    words = ["next", meeting.nodes, meeting.address, meeting.port, meeting.wait_s]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": meeting.interface}
    done = subprocess.run(
        [sys.executable, "-m", LINKS, *map(str, words)],
        stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env,
        preexec_fn=partial(die_with, os.getpid()),
    )  # fmt: skip
    if done.returncode:
        raise PlatformError(
            f"links: nothing was measured with {meeting.address}:{meeting.port}",
            hint="the same command on every node, the first one among them; see above",
        )
    where = f"{meeting.address}:{meeting.port}"
    told = f"measured with the others; the profile is on the node at {where}"
    answer({"joined": where, "nodes": meeting.nodes}, told, as_json=as_json)


def _run(script: Path, args: list[str], request: ProfileRequest) -> ProfileReport:
    with tempfile.TemporaryDirectory(prefix="perdure-profile-") as folder:
        report = Path(folder, "report")
        request = msgspec.structs.replace(request, report=str(report))
        env = {"OMP_NUM_THREADS": "1", **os.environ, ASK: encode(request).decode()}
        done = subprocess.run(
            [sys.executable, str(script), *args], env=env, stdout=sys.stderr,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        if not report.exists():
            if done.returncode:
                raise PerdureError(
                    f"{script} failed with exit code {done.returncode}",
                    hint="what follows SCRIPT is the script's own; options of perdure go before it",
                )
            raise ConfigError(
                f"{script} has ended without a call of perdure.elastic.train",
                hint="its model is measured there: perdure.elastic.train(blocks=[...], ...)",
            )
        found: ProfileReport = decode(report.read_bytes(), ProfileReport)
    if found.error:
        error = PerdureError(found.error, hint=found.hint)
        error.exit_code = found.exit_code
        raise error
    return found


def _render(found: CostProfile, report: ProfileReport) -> str:
    size = found.micro_batches[-1]
    costs = [(block, block.costs[size]) for block in found.blocks]
    rows = [
        (
            block.name,
            round(1e3 * cost.forward_s, 3),
            round(1e3 * cost.backward_s, 3),
            "-" if cost.weight_s is None else round(1e3 * cost.weight_s, 3),
            cost.input_bytes,
            cost.stored_bytes,
            block.state_bytes,
        )
        for block, cost in costs
    ]
    what = ", ".join(report.measured) or "nothing: all was kept from before"
    head = ("block", "forward ms", "backward ms", "weights ms", "input B", "stored B", "state B")
    lines = [
        f"profile      {report.path}",
        f"machine      {found.machine}",
        f"measured     {what}; worst spread {report.spread:.0%} ({report.spread_of})",
        f"micro-batch  {', '.join(map(str, found.micro_batches))}; below: {size}\n",
        render_table(head, rows),
    ]
    lines += [
        f"shared       by blocks {', '.join(map(str, shared.blocks))}, each of which counts it: "
        f"{shared.state_bytes} B of state"
        for shared in found.shared
    ]
    lines.append("")
    lines += [
        f"message      {PLACES[t.place]}: {1e6 * t.latency_s:.0f} us + bytes at "
        f"{_say_rate(t.bytes_per_s)}"
        for t in found.transfers
    ]
    lines += [
        f"all-reduce   {PLACES[a.place]}, over {a.group_size}: {1e6 * a.latency_s:.0f} us + bytes "
        f"at {_say_rate(a.bytes_per_s)}"
        for a in found.all_reduces
    ]
    return "\n".join(lines)


def _say_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
