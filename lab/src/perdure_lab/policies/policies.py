"""How each system meets nodes that come and go, as parameters, each with where it comes from.

What is measured of perdure is measured on a CPU, where a process ended. Beside systems on V100
nodes stands therefore what perdure would need where a whole node of theirs vanishes. Such costs
are assumed, for perdure as for the others: `bench/policy_ranges.py` has both ends of each. A state
that has to move takes at least the time of its bytes on the link, whatever a system says of itself.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from perdure.model.errors import ConfigError
from perdure_lab.report import MeasuredCosts, Phases


class Policy(msgspec.Struct, frozen=True):
    """A system, as the simulator knows it."""

    name: str
    source: str
    """Where the numbers come from."""
    response: Literal["reshape", "groups", "reroute"]
    """To a change: the fastest shape on what is there; whole replicas of a fixed number of stages;
    or the same grid with holes, whose weakest stage sets the pace."""
    loss: Phases
    """An active node left without a word."""
    join: Phases
    """A change of one's own will: to take nodes in, or a faster shape."""
    keeps: Literal["microbatches", "step", "checkpoint"]
    """What a loss leaves: all but the lost nodes' share of the step under way; all but that step;
    or the last checkpoint."""
    copies: Literal["stage", "neighbours", "both", "storage"]
    """Who has the state of a lost node: others of its stage; the next node in its pipeline; both
    of these; or storage only."""
    snapshot_steps: int = 0
    """What the next node in the pipeline has is a snapshot taken every so many steps; 0: it has
    the state as of this one."""
    snapshot_s: float = 0.0
    """The first step that ends so long after a snapshot has one as well, or fifty times as long
    after it as it takes to be sent, if that is longer; 0: none has."""
    restart: Phases = Phases()
    """Where nobody has it: back to the checkpoint."""
    announced: Phases | None = None
    """A loss that was announced; None: it makes nothing of that."""
    save_s: float = 0.0
    """A checkpoint stops training for so long."""
    save_interval_s: float | None = None
    """Between two; None: Daly's optimum at the trace's own MTBF, known beforehand."""
    saves_first: bool = False
    """Saves before it restarts of its own will, and on notice."""
    overlap: bool = False
    """State moves to newcomers while the old shape trains."""
    weighs: bool = False
    """Weighs what a shape earns until the next change (their mean gap so far) against the change;
    otherwise the fastest shape is taken at once."""
    efficiency: float = 1.0
    """What is left of the throughput beside its steady overhead."""
    start_s: float = 0.0
    """A node that comes later than at the beginning can be taken in after so long: its processes
    start while the others train."""


_RESTART_S = 120.0
"""Median outage of Varuna on 32 real nodes was 112 s (findings of the published raw logs)."""
_SAVE_S = 14.0
"""Varuna-style save and load as Parcae measured it."""
_START_S = 30.0
"""Until a new node's processes can be taken in (`bench/policy_ranges.py`)."""
_RESTART = Phases(abort_s=10.0, communicator_s=56.0, state_s=14.0, warmup_s=40.0)
assert _RESTART.total_s == _RESTART_S

_FORMED = Phases(communicator_s=1.5, warmup_s=0.24)
_VANISHED = msgspec.structs.replace(_FORMED, detect_s=15.3, decide_s=0.001, abort_s=0.004)
_ENDED = Phases(detect_s=0.060, decide_s=0.001, abort_s=0.004, communicator_s=0.007, warmup_s=0.017)

POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy(
            "restart-hang",
            "torchrun where survivors hang in NCCL: torch's default time-out, then restart",
            "reshape",
            loss=msgspec.structs.replace(_RESTART, detect_s=600.0),
            join=_RESTART,
            keeps="checkpoint",
            copies="storage",
            save_s=_SAVE_S,
        ),
        Policy(
            "restart",
            "torchrun, failure seen at once: 120 s to restart, 14 s to save (Varuna's logs, "
            "Parcae's cost model)",
            "reshape",
            loss=_RESTART,
            join=_RESTART,
            keeps="checkpoint",
            copies="storage",
            save_s=_SAVE_S,
        ),
        Policy(
            "varuna",
            "restart and morph, a checkpoint on notice: median outage 112 s in published logs",
            "reshape",
            loss=_RESTART,
            join=_RESTART,
            announced=_RESTART,
            keeps="checkpoint",
            copies="storage",
            save_s=_SAVE_S,
            saves_first=True,
        ),
        Policy(
            "bamboo",
            "redundant stages: .85 of the throughput (its optimistic end), 30 s assumed; a restart "
            "when neighbours leave together",
            "reshape",
            loss=Phases(communicator_s=30.0),
            join=Phases(communicator_s=30.0),
            keeps="step",
            copies="neighbours",
            restart=_RESTART,
            save_interval_s=300.0,
            efficiency=0.85,
            start_s=_START_S,
        ),
        Policy(
            "oobleck",
            "pipeline templates: 2 to 10 s and a step (its paper)",
            "reshape",
            loss=Phases(communicator_s=5.0),
            join=Phases(communicator_s=5.0),
            keeps="step",
            copies="stage",
            restart=_RESTART,
            save_interval_s=300.0,
            start_s=_START_S,
        ),
        Policy(
            "recycle",
            "micro-batches rerouted to peers of the stage: 5 s and a step assumed; bubbles that it "
            "fills are not modelled; plans anew where that is a tenth faster",
            "reroute",
            loss=Phases(communicator_s=5.0),
            join=Phases(communicator_s=5.0),
            keeps="step",
            copies="stage",
            restart=_RESTART,
            save_interval_s=300.0,
            start_s=_START_S,
        ),
        Policy(
            "torchft",
            "replica groups out until refilled: time-outs tuned to 10 s, 5 s to take one in, "
            "a step",
            "groups",
            loss=Phases(detect_s=10.0),
            join=Phases(communicator_s=5.0),
            keeps="step",
            copies="stage",
            restart=_RESTART,
            save_interval_s=300.0,
            start_s=_START_S,
        ),
        Policy(
            "in-memory",
            "checkpoint of every step in a neighbour's memory, restart in 30 s (Gemini, DLRover)",
            "reshape",
            loss=Phases(communicator_s=30.0),
            join=Phases(communicator_s=30.0),
            keeps="step",
            copies="neighbours",
            restart=_RESTART,
            save_interval_s=300.0,
            start_s=_START_S,
        ),
        Policy(
            "perdure",
            "assumed for a node that vanishes from a job on GPUs; peer snapshots every 10 steps "
            "(docs/elastic.md)",
            "reshape",
            loss=_VANISHED,
            join=_FORMED,
            announced=_FORMED,
            keeps="microbatches",
            copies="both",
            snapshot_steps=10,
            snapshot_s=1.0,
            restart=_RESTART,
            save_s=0.186,
            save_interval_s=300.0,
            overlap=True,
            weighs=True,
            start_s=_START_S,
        ),
    )
}

ENDED_PROCESS = msgspec.structs.replace(
    POLICIES["perdure"],
    name="perdure-exit",
    source="bench/RESULTS.md, Elastic: SIGKILL to the survivors' next step, 6 kills of 4 ranks on "
    "CPU: death and reap 60 ms, decide 1, order 4, form 7, redo and commit 17",
    loss=_ENDED,
    join=Phases(communicator_s=0.007, warmup_s=0.017),
    announced=Phases(communicator_s=0.007, warmup_s=0.017),
    restart=Phases(detect_s=0.060, abort_s=0.159, communicator_s=0.653),
    start_s=0.0,
)
"""perdure as it was measured: a process ends, on a CPU. No peer of the others."""


def apply_costs(policy: Policy, costs: MeasuredCosts) -> Policy:
    """Return `policy` with costs that were measured; checkpoints are in its steady one."""
    return msgspec.structs.replace(
        policy,
        source=f"{costs.source} ({costs.losses} losses, {costs.joins} joins)",
        loss=costs.loss,
        join=costs.join,
        announced=costs.announced,
        restart=ENDED_PROCESS.restart,
        start_s=costs.start_s,
        efficiency=1.0 - costs.steady,
        save_s=0.0,
    )


def parse_policies(names: str) -> list[Policy]:
    """Return the policies in `names`, separated by commas; `all` is every one."""
    return [POLICIES[name] for name in pick_names(names, POLICIES, "no policy `{}`")]


def pick_names(names: str, known: Collection[str], refusal: str) -> list[str]:
    """Return the words of `names`, separated by commas; `all` is every one that is known.

    Raises:
        ConfigError: one is not; `refusal` says it, with a place for the name.
    """
    found = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in found:
        if name not in known:
            raise ConfigError(refusal.format(name), hint="all, or of " + ", ".join(known))
    return found


def change_policy(policies: list[Policy], setting: str) -> list[Policy]:
    """Return `policies` with `POLICY.FIELD=VALUE` or `POLICY.PHASES.FIELD=VALUE` carried out.

    Raises:
        ConfigError: There is no such policy or field, or the value does not fit it.
    """
    path, equals, value = setting.partition("=")
    name, *fields = path.split(".")
    if not equals or not fields or name not in {p.name for p in policies}:
        raise ConfigError(
            f"cannot set `{setting}`", hint="POLICY.FIELD=VALUE, such as perdure.loss.detect_s=1"
        )
    try:
        new: object = msgspec.json.decode(value)
    except msgspec.DecodeError:
        new = value
    changed = []
    for policy in policies:
        document = msgspec.to_builtins(policy)
        if policy.name == name:
            inner = document
            for field in fields[:-1]:
                inner = inner.get(field) if isinstance(inner, dict) else None
            if not isinstance(inner, dict) or fields[-1] not in inner:
                hint = ", ".join(inner) if isinstance(inner, dict) else ", ".join(document)
                raise ConfigError(f"{name} has no `{'.'.join(fields)}`", hint=hint)
            inner[fields[-1]] = new
            document["source"] += f"; {path}={value}"
        try:
            changed.append(msgspec.convert(document, Policy))
        except msgspec.ValidationError as error:
            raise ConfigError(f"cannot set `{setting}`: {error}", hint="a number") from error
    return changed
