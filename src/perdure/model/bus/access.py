"""Who may say and hear what on the bus: roles, their permissions by subject, and by type of event.

    role        may publish                          may hear
    controller  orders, the journal, every answer    events, beats, commands, queries,
                                                     notices, requests for a place
    run         its events, commands,                answers to itself
                the journal's end
    operator    commands, queries, notices, replay   answers to itself, the journal
    agent       its node's events and beats, probes, its own orders and probes
                its place's lines
    lighthouse  its events, orders (fenced aborts),  its own orders, events, beats,
                answers to relays                    lines
    viewer      queries                              answers to itself, new journal entries
    worker      queries                              answers to itself
    monitor     notices                              answers to itself
    joiner      requests for a place                 answers to itself

Where others start the groups (`perdure serve`) there are no agents. The relay of a machine with
such groups has the login of an agent, by the number of its place, and passes on what ranks say.

Every role hears answers under an inbox of its own only, so that none reads another's. JetStream
sends its answers to any subject that the asker names, past these permissions. With that, a login
that may ask JetStream anything can also write to the journal, or delete it. So only the controller,
`run`, and operators may ask.

The same table is what a user's own cluster should be given (`docs/nats.md`).

A subject says who speaks: the server lets an agent publish events of its own node only. What that
sender may tell of is the second table, `BROUGHT_BY`: each type of event has a row. What it may ask
for is the third, `ASKED_BY`. The controller looks at them again at its door, since a user's own
server may not: at commands in `service/controller/inbox.py`, at events in `control/senders.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import msgspec

from perdure.model import events
from perdure.model.bus.wire import (
    RUN,
    stream_journal,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_lines,
    subject_notices,
    subject_orders,
    subject_queries,
)
from perdure.model.orders import LIGHTHOUSE
from perdure.model.signals.links import subject_probe
from perdure.model.steering import Verb

Role = Literal[
    "controller", "run", "operator", "agent", "lighthouse", "viewer", "worker", "monitor", "joiner"
]
ROLES: tuple[Role, ...] = get_args(Role)


Sender = Literal["controller", "run", "agent", "rank", "lighthouse"]
"""Who brings events. A rank's come by way of its node's agent; where others have started it, of the
lighthouse or of its machine's relay. Operators, monitors, viewers and
machines that join bring none: they ask (`COMMANDS`), and the controller journals what was asked."""

BROUGHT_BY: Mapping[type[events.Event], tuple[Sender, ...]] = MappingProxyType(
    {
        events.JobSubmitted: ("controller",),
        events.ControllerStarted: ("controller",),
        events.NodeRegistered: ("agent",),
        events.StoreReady: ("agent",),
        events.RanksStarted: ("agent",),
        events.RankExited: ("agent",),
        events.GenerationStopped: ("agent",),
        events.TornFound: ("agent",),
        events.OwnChecked: ("agent",),
        events.KeeperLost: ("agent",),
        events.NodeLost: ("controller",),
        events.RankJoined: ("rank",),
        events.ProgressNoted: ("controller",),
        events.GenerationStepping: ("controller",),
        events.MetricsLogged: ("rank",),
        events.CheckpointSaved: ("rank",),
        events.CheckpointFailed: ("rank",),
        events.CheckpointRestored: ("rank",),
        events.ResumeCompared: ("controller",),
        events.VerdictReached: ("controller", "agent"),  # An agent's: its own keeper is silent.
        events.VerdictWithdrawn: ("controller", "agent"),
        events.StacksTaken: ("agent",),
        events.LinksNoted: ("controller",),
        events.ProbeEnded: ("agent",),
        events.ProbeJudged: ("controller",),
        events.CollectivesInterrupted: ("rank",),
        events.WorldBroken: ("rank",),
        events.WorldReformed: ("rank",),
        events.MemberReady: ("rank",),
        events.NodeCordoned: ("controller",),
        events.NodeRestored: ("controller",),
        events.NodeDraining: ("controller",),
        events.NodeAsked: ("agent",),
        events.CommandReceived: ("controller",),
        events.BoundaryAnswered: ("rank", "lighthouse"),
        events.BoundaryReached: ("rank",),
        events.RanksAgreed: ("controller",),
        events.FaultInjected: ("agent", "rank", "lighthouse"),
        events.KeysDeclared: ("rank",),
        events.SettingsChanged: ("controller",),
        events.JobPaused: ("controller",),
        events.JobResumed: ("controller",),
        events.OperatorNoted: ("controller",),
        events.QuorumFormed: ("lighthouse",),
        events.QuorumIdsReserved: ("lighthouse",),
        events.ReplicaLate: ("lighthouse",),
        events.ReplicaSeen: ("lighthouse",),
        events.ReplicaWaiting: ("rank",),
        events.RankAttached: ("rank",),
        events.RankLeft: ("rank",),
        events.DeviceReported: ("controller",),
        events.ControllerLost: ("run",),
        events.PreemptionNoticed: ("controller", "agent"),
        events.PreemptionWithdrawn: ("controller", "agent"),
        events.MachineReported: ("controller",),
        events.RoomNoted: ("run", "agent"),
        events.ActionWithheld: ("controller",),
        events.SlotLeftEmpty: ("controller",),
        events.FailureDecided: ("controller",),
        events.InvitationMade: ("controller",),
        events.InvitationUsed: ("controller",),
        events.InvitationRevoked: ("controller",),
        events.JournalMended: ("controller",),
        events.TimerFired: ("controller",),
        events.JobEnded: ("controller",),
    }
)
"""Type of event -> who may bring it. A test fails where a type has no row."""

ASKED_BY: Mapping[Role, frozenset[str]] = MappingProxyType(
    {
        "operator": frozenset(get_args(Verb)) - {"join"} | {"ping", "status"},
        "run": frozenset(get_args(Verb)) - {"join"} | {"ping", "status"},
        "viewer": frozenset({"ping", "status"}),
        "worker": frozenset({"ping", "status"}),
        "monitor": frozenset({"notify"}),
        "joiner": frozenset({"join"}),
    }
)
"""Role -> the kinds of command that it may ask for, by its subject; roles without a row, none."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects of one role. What is not listed is refused by the server, and logged there."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """It may also answer each request that it was sent, once."""


INBOX = "_INBOX."
"""Prefix of all subjects of answers."""


def inbox_prefix(user: str) -> str:
    """Return the prefix of the subjects on which `user` awaits answers; `user` has no dots."""
    return INBOX + user


def user_name(role: Role, node: int | None = None) -> str:
    """Return the name of a role's user, which is also that of its credentials' file."""
    return role if node is None else f"{role}-{node}"


def build_access(role: Role, job: str, node: int | str | None = None) -> Access:
    """Return what `role` may do; `node` is that of an agent, `*` that of any."""
    user = user_name(role, node if isinstance(node, int) else None)
    me = "*" if node is None else node
    api, stream = "$JS.API", stream_journal(job)
    direct = f"{api}.DIRECT.GET.{stream}"
    last = (
        f"{api}.STREAM.INFO.{stream}",
        f"{api}.STREAM.MSG.GET.{stream}",
        direct,
        f"{direct}.>",
    )
    replay = (
        f"{api}.CONSUMER.CREATE.{stream}",
        f"{api}.CONSUMER.CREATE.{stream}.>",
        f"{api}.CONSUMER.INFO.{stream}.>",
        f"{api}.CONSUMER.MSG.NEXT.{stream}.>",
    )
    events_, beats, orders = subject_events(job, "*"), subject_beats(job, "*"), subject_orders
    commands, ask, notices = subject_commands(job), subject_queries(job), subject_notices(job)
    journal = subject_journal(job)
    said_and_heard: dict[Role, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "controller": (
            (
                orders(job, "*"),
                journal,
                f"{INBOX}>",
                f"{api}.STREAM.CREATE.{stream}",
                f"{api}.STREAM.DELETE.{stream}",
                *last,
                *replay,
            ),
            (events_, beats, commands, ask, notices, subject_joins(job)),
        ),
        "run": ((subject_events(job, RUN), commands, *last), ()),
        "operator": ((commands, ask, notices, *last, *replay), (journal,)),
        "agent": (
            (
                subject_events(job, me),
                subject_beats(job, me),
                subject_probe(job, "*"),
                subject_lines(job, me),
            ),
            (
                orders(job, me),
                orders(job, "all"),
                subject_probe(job, me),
            ),
        ),
        "lighthouse": (
            (subject_events(job, LIGHTHOUSE), orders(job, "*")),
            (orders(job, LIGHTHOUSE), events_, beats, subject_lines(job, "*")),
        ),
        "viewer": ((ask,), (journal,)),
        "worker": ((ask,), ()),
        "monitor": ((notices,), ()),
        "joiner": ((subject_joins(job),), ()),
    }
    said, heard = said_and_heard[role]
    inbox = f"{inbox_prefix(user)}.>"
    return Access(publish=said, subscribe=(*heard, inbox), answers=role in ("agent", "lighthouse"))
