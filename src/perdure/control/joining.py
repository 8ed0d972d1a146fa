"""Machines from elsewhere: who may take a place, and who is given which node of the job.

A place is one of the last `remote` nodes. It is free if no machine was given it, or if the one that
was is lost; a machine that asks again gets the place that it had. Whoever has a place registers as
that node, as any other does, and everything else follows from that. Where others start the groups
there are no nodes: a place is a machine's that brings ranks, until its login is ended. Who may ask
is who holds an invitation: they expire, serve once, and can be revoked.

An invitation serves the machine that used it first for as long as the job lives: after a reboot it
asks with the same one, expired or not. Anybody else with a copy of it is refused. What is kept is
the digest of its secret, so that the journal, which viewers read, invites nobody.

How a rank comes into an elastic world, and gets its state, is not here:
`worker/elastic/joining.py`.
"""

import math
from typing import Any

from perdure.control.job import Answer, Invited, JobState, OpenCommand
from perdure.model.events import KEPT_MAX, InvitationMade, InvitationRevoked, InvitationUsed
from perdure.model.orders import AnyAction, RecordEvent
from perdure.model.signals.progress import BEAT_S

FINAL = {"final": True}
"""In the answer to a request that will be refused whenever it is made again."""
_ALL_LOCAL = "no node of this job comes from elsewhere: perdure run --remote K"
_NONE_SERVED = "no machine has a place beside this one: perdure serve --remote K"
_TWIN_S = 10 * BEAT_S
"""A node that was heard of within this time lives, whoever else asks for its place."""
_CLAIM_S = 30.0
"""A machine that was given a place, and has not registered within this time, has given it up."""


def receive_invite(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Remember an invitation that its maker hands out once this is answered."""
    args, spec = command.args, state.the_spec()
    if not spec.remote:
        return state.answer(command.id, False, _NONE_SERVED if spec.served else _ALL_LOCAL, {})
    id_, digest = str(args["id"]), str(args["digest"])
    expires_s = float(args.get("expires_s", 0.0))
    until_s = float(args.get("until_s", now + expires_s if expires_s else 0.0))
    uses = int(args.get("uses", 1))
    machines = {str(k)[:64]: str(v)[:64] for k, v in dict(args.get("machines", {})).items()}
    known_time = 0 <= expires_s < 1e12 and 0 <= until_s < 1e12
    if not (0 < len(id_) <= 32 and len(digest) == 64 and known_time and uses >= 0):
        return state.answer(command.id, False, "not an invitation", {})
    if id_ in state.invitations:
        return state.answer(command.id, True, "known", {"id": id_})
    event = InvitationMade(
        id=id_, digest=digest, at_s=now, until_s=until_s, uses=uses, who=command.who,
        machines=machines,
    )  # fmt: skip
    made = RecordEvent(event=event, reason=f"asked for by {command.who or 'an operator'}")
    return [made, *state.answer(command.id, True, "", {"id": id_, "until_s": until_s})]


def receive_revoke(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Let nobody come by an invitation any more; name who is there, and the nodes it served."""
    id_ = str(command.args["id"])
    known = state.invitations.get(id_)
    if known is None:
        names = ", ".join(state.invitations) or "none"
        return state.answer(command.id, False, f"there is no invitation {id_:.40}: {names}", {})
    there = [n for n, (m, _) in state.claims.items() if m in known.machines and n in state.nodes]
    there = sorted(node for node in there if node not in state.lost)
    if state.the_spec().served:  # Until its login is ended a machine speaks for its place.
        there = sorted(n for n, (m, _) in state.claims.items() if m in known.machines)
        for place in there if command.args.get("end_login") else ():
            del state.claims[place]
    result = {"id": id_, "nodes": there, "served": sorted(known.nodes)}
    revoked = InvitationRevoked(id=id_, at_s=now, who=command.who)
    reason = f"asked for by {command.who or 'an operator'}"
    return [RecordEvent(event=revoked, reason=reason), *state.answer(command.id, True, "", result)]


def preview_invitations(
    state: JobState, now: float, kind: str, args: dict[str, Any]
) -> Answer | None:
    """Return the answer to a request for the list of invitations; None where it is none."""
    if kind != "invite" or not args.get("list"):
        return None
    return Answer(True, "", {"invitations": _list_invitations(state, now)})


def _list_invitations(state: JobState, now: float) -> list[dict[str, Any]]:
    """Return all that are known, the oldest first, without what would let anybody in."""
    return [
        {
            "id": id_,
            "state": _describe(each, now),
            "until_s": each.made.until_s,
            "uses": each.made.uses,
            "machines": dict(each.machines),
            "nodes": sorted(n for n, (m, _) in state.claims.items() if m in each.machines),
            "who": each.made.who,
            "made_s": each.made.at_s,
        }
        for id_, each in state.invitations.items()
    ]


def note_invitation(
    state: JobState, now: float, event: InvitationMade | InvitationUsed | InvitationRevoked
) -> list[AnyAction]:
    """Remember what has become of an invitation; nothing follows from it."""
    known = state.invitations.get(event.id)
    match event:
        case InvitationMade():
            state.invitations[event.id] = Invited(event, dict(event.machines))
            over = [
                id_
                for id_, each in state.invitations.items()
                if _describe(each, event.at_s) in ("revoked", "expired") and not each.machines
            ]
            for id_ in over[: max(0, len(state.invitations) - KEPT_MAX)]:
                del state.invitations[id_]
        case InvitationUsed() if known is not None:
            known.machines[event.machine] = event.host
            known.nodes.add(event.node)
        case InvitationRevoked() if known is not None:
            known.revoked = True
        case _:
            pass
    return []


def refuse_use(
    state: JobState, now: float, id_: str, proof: str, machine: str
) -> tuple[str, dict[str, Any]]:
    """Return why `machine` may not come by invitation `id_`, and more for the answer; or ''."""
    known = state.invitations.get(id_)
    if known is None or known.made.digest != proof:
        return "the invitation is not one of this job's", FINAL
    if known.revoked:
        return f"invitation {id_} was revoked", FINAL
    if machine in known.machines:
        return "", {}
    if known.made.until_s and now >= known.made.until_s:
        good_s = known.made.until_s - known.made.at_s
        return f"invitation {id_} has expired: it was good for {good_s:.0f} s", FINAL
    if known.made.uses and len(known.machines) >= known.made.uses:
        hosts = ", ".join(sorted(known.machines.values()))
        return f"invitation {id_} is spent: it has served {hosts:.80}", FINAL
    for other, each in state.invitations.items():
        if machine in each.machines and other != id_:
            place = next((n for n, (m, _) in state.claims.items() if m == machine), None)
            if place is not None and place in state.nodes and place not in state.lost:
                return f"this machine is node {place} already, by another invitation", {}
    return "", {}


def _describe(invited: Invited, now: float) -> str:
    if invited.revoked:
        return "revoked"
    if invited.made.uses and len(invited.machines) >= invited.made.uses:
        return "spent"
    return "expired" if invited.made.until_s and now >= invited.made.until_s else "open"


def receive_join(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Give a machine a place, or say why there is none."""
    machine, spec = str(command.args["machine"]), state.the_spec()
    places = spec.places
    id_ = command.args.get("invitation")  # None: of a run before invitations were told apart.
    if id_ is not None:
        proof = str(command.args["proof"])
        why, more = refuse_use(state, now, str(id_), proof, machine)
        if why:
            return state.answer(command.id, False, why, dict(more))
    if not places:
        return state.answer(command.id, False, _NONE_SERVED if spec.served else _ALL_LOCAL, {})
    mine = next((n for n in places if state.claims.get(n, ("", 0.0))[0] == machine), None)
    free = [node for node in places if _is_free(state, now, node)]
    node = mine if mine is not None else min(free, default=None)
    silent_s = dict(command.args.get("silent_s", {})).get(str(mine), math.inf)
    if mine is not None and _is_there(state, mine) and silent_s < _TWIN_S:
        why = f"this machine is node {mine} already, and heard of: is its PERDURE_HOME a copy?"
        return state.answer(command.id, False, why, {"silent_in_s": 2 * _TWIN_S})
    if node is None:
        names = ", ".join(map(str, places))
        verb = "s {} are" if len(places) > 1 else " {} is"
        what = "place" if spec.served else "node"
        why = f"no place is free: {what}{verb.format(names)} taken"
        return state.answer(command.id, False, why, {})
    state.claims[node] = (machine, now)
    host = str(command.args.get("host") or "a machine")
    is_now = f"{host} has place {node}" if spec.served else f"{host} is node {node}"
    if not spec.served:
        state.hosts[host] = node
    actions = state.answer(command.id, True, is_now, {"node": node})
    if id_ is None:
        return actions
    used = InvitationUsed(id=str(id_), machine=machine, host=host, node=node, at_s=now)
    return [RecordEvent(event=used, reason=is_now), *actions]


def _is_there(state: JobState, node: int) -> bool:
    return node in state.nodes and node not in state.lost


def _is_free(state: JobState, now: float, node: int) -> bool:
    """Return whether nobody is there, and nobody else was sent there a moment ago."""
    if state.the_spec().served:
        return node not in state.claims
    if node in state.barred or _is_there(state, node):
        return False
    _, claimed_s = state.claims.get(node, ("", -math.inf))
    promised = claimed_s >= state.lost.get(node, -math.inf)
    return not promised or now >= claimed_s + _CLAIM_S
