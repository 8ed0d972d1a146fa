"""`perdure plan`: the world for a number of devices, from a cost profile."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from perdure.cli.page.keeping import keep
from perdure.cli.speech.say import Json, keep_given, note, print_json, render_table
from perdure.dash.shape import render_span
from perdure.files.regular import read_file
from perdure.model.errors import ConfigError
from perdure.model.planning.costs import HINT, CostProfile, read_profile
from perdure.model.planning.world import Device, make_devices
from perdure.plan.pipeline.simulate import simulate
from perdure.plan.worlds.planner import Excluded, Option, Plan, Request, plan_worlds
from perdure.plan.worlds.score import Scorer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", re.IGNORECASE)


PerNode = Annotated[
    int | None,
    typer.Option(
        "--per-node",
        min=1,
        help="Devices of a node. Default: 1; all, where only links within a node were measured.",
    ),
]

Schedules = Annotated[
    list[str] | None,
    typer.Option("--schedule", help="1f1b, interleaved, rerouted or zero-bubble; repeatable."),
]

Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="DEVICE=FACTOR", help="A straggler, n3/0=1.5; repeatable."),
]

Recompute = Annotated[
    str, typer.Option("--recompute", help="auto (where memory asks for it), never or always.")
]

MicroBatch = Annotated[
    list[int] | None, typer.Option("--micro-batch", min=1, help="Only this size; repeatable.")
]


def plan(
    file: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="A cost profile, as in docs/planning.md.")
    ],
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many devices there are.")],
    global_batch: Annotated[int, typer.Option("--global-batch", min=1, help="Samples of a step.")],
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of a device, such as 80GiB.")
    ],
    per_node: PerNode = None,
    micro_batch: MicroBatch = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--ranks", min=1, help="Only pipelines of this many ranks; repeatable."),
    ] = None,
    schedule: Schedules = None,
    recompute: Recompute = "auto",
    slow: Slow = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Without --json: draw the chosen world's step.")
    ] = False,
    width: Annotated[int, typer.Option("--width", min=40, help="With --timeline: columns.")] = 100,
    as_json: Json = False,
) -> None:
    """Choose D, P, micro-batch, recompute, schedule and placement.

    Devices are called n0/0, n0/1, ... by node; a last node may have fewer.
    """
    profile = load_profile(file)
    if per_node is None:
        measured = {transfer.place for transfer in profile.transfers}
        per_node = devices if measured == {"node"} else 1
    slower = _read_slow(slow)
    nodes = -(-devices // per_node)
    there = make_devices(nodes, per_node, parse_size(memory), slow=slower)[:devices]
    unknown = {name for name, _ in slower} - {device.name for device in there}
    if unknown:
        raise ConfigError(
            f"there is no device {min(unknown)}", hint=f"the last is {there[-1].name}"
        )
    fields = {
        "global_batch": global_batch,
        "micro_batches": micro_batch or [],
        "ranks": ranks or [],
        "recompute": recompute,
        **keep_given(schedules=schedule or None),
    }
    try:
        request = msgspec.convert(fields, Request)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).lower(), hint="perdure plan --help") from None
    found = _search(profile, there, request, as_json)
    _keep_plan(file.name, profile, there, per_node, request, found)
    if as_json:
        print_json({"profile": profile.fingerprint, **msgspec.to_builtins(found)})
        return
    if not found.options:
        reasons = [entry for entry in found.excluded if entry.kind != "batch"]
        raise ConfigError(
            f"no world fits {devices} devices of {memory}",
            hint=explain_excluded(reasons[0]) if reasons else "fewer ranks than blocks and devices",
        )
    print(_render(found))
    for text in found.notes:
        note(text)
    if timeline:
        from perdure.dash.timeline import LEGEND, render_timeline

        orders, pipe, names = Scorer(profile, there).lay_out(found.options[0].world)
        print(f"\n{render_timeline(simulate(orders, pipe), names, width)}\n{LEGEND}")


def _search(profile: CostProfile, there: Sequence[Device], request: Request, as_json: bool) -> Plan:
    """Return the fastest worlds; how many there are to try is only known afterwards."""
    from perdure.cli.speech.bar import Bar

    with Bar(as_json=as_json) as bar:
        bar.say("plan", None, f"{len(there)} devices")
        return plan_worlds(profile, there, request)


def _keep_plan(
    name: str,
    profile: CostProfile,
    there: Sequence[Device],
    per_node: int,
    request: Request,
    found: Plan,
) -> None:
    """Keep what was found for a profile's file called `name`."""
    from perdure_lab.results import KeptPlan

    keep(
        KeptPlan(
            profile=name,
            fingerprint=profile.fingerprint,
            devices=len(there),
            per_node=per_node,
            memory_bytes=there[0].memory_bytes,
            global_batch=request.global_batch,
            plan=found,
        )
    )


def load_profile(file: Path) -> CostProfile:
    """Return the cost profile in `file`.

    Raises:
        ConfigError: There is none, or it is malformed.
    """
    return read_profile(read_text(file, str(file), HINT), str(file))


def read_text(file: Path, what: str, hint: str) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: There is none, or it is not UTF-8: "cannot read `what`".
    """
    try:
        return read_file(file, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "expected UTF-8"
        raise ConfigError(f"cannot read {what}: {why}", hint=hint) from error


def parse_size(text: str) -> int:
    """Return the bytes that `text` says.

    >>> parse_size("1.5GB"), parse_size("2GiB")
    (1500000000, 2147483648)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text} is not a size", hint="as in 16GB or 80GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _read_slow(given: list[str] | None) -> list[tuple[str, float]]:
    found = []
    for text in given or []:
        name, _, factor = text.partition("=")
        try:
            found.append((name, float(factor)))
        except ValueError:
            raise ConfigError(f"--slow {text}: expected DEVICE=FACTOR", hint="n3/0=1.5") from None
        if not found[-1][1] >= 1.0:
            raise ConfigError(f"--slow {text}: expected a factor from 1 on", hint="n3/0=1.5")
    return found


def _render(found: Plan) -> str:
    best = found.options[0]
    stages = [
        f"stage {number:<6} blocks {stage.first}-{stage.stop - 1}"
        f"{', recompute' if stage.recompute else ''}: {', '.join(stage.devices[:4])}"
        f"{', ...' if len(stage.devices) > 4 else ''}"
        for number, stage in enumerate(best.world.stages)
    ]
    rows = [
        (
            o.world.shape,
            describe_option(o),
            f"{o.step_s:.4f}",
            f"{o.step_s / best.step_s - 1:+.1%}",
            f"{o.bubble:.1%}",
            o.idle,
        )
        for o in found.options[1:]
    ]
    head = ("runner-up", "how", "step s", "slower", "bubble", "idle")
    lines = [
        f"world        {best.world.shape}: {describe_option(best)}",
        f"step         {best.step_s:.4f} s, {best.samples_per_s:.1f} samples/s",
        f"bubble       {best.bubble:.1%}, {best.idle} devices idle",
        f"memory       {best.memory_bytes / 1e9:.2f} GB on the fullest device",
        *stages,
        "",
        *([render_table(head, rows)] if rows else []),
        *(f"not possible: {explain_excluded(entry)}" for entry in found.excluded),
        f"{found.simulated} worlds simulated; {found.slower} kinds of worlds cannot be faster",
    ]
    return "\n".join(lines)


def describe_option(option: Option) -> str:
    """Return how a world works."""
    world = option.world
    again = sum(stage.recompute for stage in world.stages)
    recompute = f", {again} of {len(world.stages)} stages recompute" if again else ""
    return f"{world.schedule}, {world.count} micro-batches of {world.micro_batch}{recompute}"


def explain_excluded(entry: Excluded) -> str:
    """Return what cannot be, and why."""
    numbers = render_span(entry.ranks, len(entry.ranks)).replace(",", ", ")
    ranks = f", {numbers} ranks" if entry.ranks else ""
    return f"{entry.what}{ranks}: {entry.reason}"
