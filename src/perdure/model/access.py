"""Who may say and hear what on the bus: roles, and their permissions by subject.

    role        may publish                          may hear
    controller  orders, the journal, every answer    events, beats, commands, queries,
                                                     notices, requests for a place
    run         events, commands, the journal's end  answers to itself
    operator    commands, queries, notices, replay   answers to itself, the journal
    agent       events, beats, probes                its own orders and probes
    lighthouse  events, orders (fenced aborts)       its own orders, events, beats
    viewer      queries                              answers to itself, the journal
    worker      queries                              answers to itself
    monitor     notices                              answers to itself
    joiner      requests for a place                 answers to itself

Every role hears answers under an inbox of its own only, so that none reads another's. A viewer
reads the journal message by message (`DIRECT.GET`) and may make no consumer: a consumer's
deliveries go to any subject that its maker names, past these permissions.

The same table is what a user's own cluster should be given (`docs/nats.md`).
"""

from typing import Literal

import msgspec

from perdure.model.probing import subject_probe
from perdure.model.wire import (
    bucket_lease,
    stream_journal,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_notices,
    subject_orders,
    subject_queries,
)

Role = Literal[
    "controller", "run", "operator", "agent", "lighthouse", "viewer", "worker", "monitor", "joiner"
]
ROLES: tuple[Role, ...] = (
    "controller",
    "run",
    "operator",
    "agent",
    "lighthouse",
    "viewer",
    "worker",
    "monitor",
    "joiner",
)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects of one role. What is not listed is refused by the server, and logged there."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """It may also answer each request that it was sent, once."""


def inbox_prefix(user: str) -> str:
    """Return the prefix of the subjects on which `user` awaits answers; `user` has no dots."""
    return f"_INBOX.{user}"


def user_name(role: Role, node: int | None = None) -> str:
    """Return the name of a role's user, which is also that of its credentials' file."""
    return role if node is None else f"{role}-{node}"


def find_access(role: Role, job: str, node: int | str | None = None) -> Access:
    """Return what `role` may do; `node` is that of an agent, `*` that of any."""
    user = f"{role}-{node}" if isinstance(node, int) else role
    inbox = (f"{inbox_prefix(user)}.>",)
    api, stream = "$JS.API", stream_journal(job)
    info, direct = f"{api}.STREAM.INFO.{stream}", f"{api}.DIRECT.GET.{stream}"
    last = (info, f"{api}.STREAM.MSG.GET.{stream}", direct, f"{direct}.>")
    replay = (
        f"{api}.CONSUMER.CREATE.{stream}",
        f"{api}.CONSUMER.CREATE.{stream}.>",
        f"{api}.CONSUMER.INFO.{stream}.>",
        f"{api}.CONSUMER.MSG.NEXT.{stream}.>",
    )
    live = (subject_journal(job),)
    ask = subject_queries(job)
    match role:
        case "controller":
            orders = (subject_orders(job, "*"), subject_journal(job))
            make = (f"{api}.STREAM.CREATE.{stream}", f"{api}.STREAM.DELETE.{stream}")
            bucket = bucket_lease(job)
            lease = (
                f"{api}.STREAM.CREATE.KV_{bucket}",
                f"{api}.STREAM.INFO.KV_{bucket}",
                f"{api}.DIRECT.GET.KV_{bucket}.>",
                f"$KV.{bucket}.>",
            )
            told = (subject_events(job), subject_beats(job), subject_commands(job), ask)
            return Access(
                publish=(*orders, "_INBOX.>", *make, *last, *replay, *lease),
                subscribe=(*told, subject_notices(job), subject_joins(job), *inbox),
            )
        case "run":
            said = (subject_events(job), subject_commands(job))
            return Access(publish=(*said, *last), subscribe=inbox)
        case "operator":
            asked = (subject_commands(job), ask, subject_notices(job))
            return Access(publish=(*asked, *last, *replay), subscribe=(*live, *inbox))
        case "agent":
            probes = f"perdure.{job.replace('.', '_')}.probe.*"
            me: int | str = "*" if node is None else node
            own = probes if me == "*" else subject_probe(job, int(me))
            return Access(
                publish=(subject_events(job), subject_beats(job), probes),
                subscribe=(subject_orders(job, me), subject_orders(job, "all"), own, *inbox),
                answers=True,
            )
        case "lighthouse":
            heard = (subject_orders(job, role), subject_events(job), subject_beats(job))
            said = (subject_events(job), subject_orders(job, "*"))
            return Access(publish=said, subscribe=(*heard, *inbox))
        case "viewer":
            return Access(publish=(ask, info, direct, f"{direct}.>"), subscribe=(*live, *inbox))
        case "worker":
            return Access(publish=(ask,), subscribe=inbox)
        case "monitor":
            return Access(publish=(subject_notices(job),), subscribe=inbox)
        case "joiner":
            return Access(publish=(subject_joins(job),), subscribe=inbox)
