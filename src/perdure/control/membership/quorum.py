"""Replica groups of a torchft job: each is a world of its own, and the lighthouse says who trains.

What is done to one touches no other, so that nothing waits for the other nodes; nothing but a
change of settings and a checkpoint has to be agreed upon.
"""

from collections.abc import Collection, Iterable

import msgspec
from msgspec import structs

from perdure.control.job import JobState
from perdure.control.lighthouse.patience import QuorumConfig
from perdure.control.membership.fixed import Addressed, Fixed, Started
from perdure.control.promises import OpenBoundary, OpenChange
from perdure.control.world import WorldState
from perdure.model.events import RanksStarted
from perdure.model.job import JobSpec
from perdure.model.orders import (
    AnyAction,
    Assignment,
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    ReplicaGroup,
)


def make_quorum_config(spec: JobSpec) -> QuorumConfig:
    """Return for how long the members of a job wait for one another."""
    own = msgspec.convert(spec.torchft, QuorumConfig, from_attributes=True)
    return own.follow(spec.detect)


def hold_groups(state: JobState, reason: str) -> HoldReplicas:
    """Return the newest word: which store is whose, and who gets no quorum for now.

    Its patience, of which `perdure set` may have changed a part, goes with it.
    """
    state.quorum.holds += 1
    paused, elsewhere = state.steering.pause is not None, state.the_spec().served
    groups = []
    for number, group in sorted(state.worlds.items()):
        if not group.alive and not (elsewhere and number in state.barred):
            continue
        if group.store is None and not elsewhere:
            continue
        held = not group.replica.active or bool(group.replica.leaving) or paused
        store = f"{group.store.host}:{group.store.port}" if group.store else ""
        ready = (
            not group.replica.active and not group.replica.leaving and number not in state.barred
        )
        spare = ready and not paused and not elsewhere
        groups.append(ReplicaGroup(number, group.generation, store, held, spare))
    held_names = tuple(
        g.replica.name
        for _, g in sorted(state.worlds.items())
        if g.replica.name and (not g.replica.active or g.replica.leaving or paused)
    )
    patience = make_quorum_config(state.the_spec())
    return HoldReplicas(
        replicas=held_names,
        number=state.quorum.holds,
        groups=tuple(groups),
        startup_s=patience.startup_s,
        alone_s=patience.alone_s,
        reason=reason,
    )


def wanted_groups(state: JobState) -> int:
    """Return how many groups shall train, where so many are there: all that others start."""
    spec = state.the_spec()
    if spec.served:
        return sum(n not in state.barred for n in state.worlds)
    return spec.torchft.replicas


def least_groups(state: JobState) -> int:
    """Return without how many groups nothing is trained."""
    return state.the_spec().torchft.min_replicas


def count_missing(state: JobState) -> int:
    """Return how many groups more shall train; less than none where there are too many."""
    there = sum(group.replica.active and group.alive for group in state.worlds.values())
    return wanted_groups(state) - there


def describe_lack(state: JobState, left: int, would: str) -> str:
    """Return in words that `left` groups, which would do something, are too few; else nothing."""
    least = least_groups(state)
    return "" if left >= least else f"{left} replicas {would}, and at least {least} are needed"


def count_left(state: JobState, leaving: set[int]) -> tuple[int, int]:
    """Return how many groups that train now would go on without `leaving`, and how many in all.

    Before the first quorum, groups that are starting count as those that train.
    """
    quorum = state.quorum
    staying = [
        g
        for number, g in state.worlds.items()
        if number not in leaving
        and g.replica.active
        and g.alive
        and not (g.replica.leaving or g.replica.absent)
    ]
    members = [g for g in staying if g.replica.name in quorum.members or not quorum.members]
    coming = [g for g in list_spare_groups(state) if g.number not in leaving]
    wanted = wanted_groups(state)
    return len(members), max(len(members), min(len(staying) + len(coming), wanted))


def _refuse_with_others(state: JobState, why: str) -> str:
    """Return `why` something cannot be where the lighthouse is not perdure's own; else nothing."""
    return why if state.the_spec().torchft.lighthouse != "perdure" else ""


def list_mute_groups(state: JobState) -> list[WorldState]:
    """Return the members of the quorum that cannot be asked, for others have started them."""
    if not state.the_spec().served:
        return []
    return [g for g in state.list_members() if len(g.joined) < state.the_spec().nproc]


def refuse_drain(state: JobState) -> str:
    """Return why no group can be left while it lives; empty where the lighthouse is our own."""
    return _refuse_with_others(
        state,
        "only perdure's own lighthouse can form a quorum without a living replica "
        '(torchft.lighthouse = "perdure"); evict ends its processes',
    )


def let_go(state: JobState, group: WorldState, reason: str) -> list[AnyAction]:
    """Have the lighthouse forget it, and those who hang on it in a collective go on."""
    name, quorum = group.replica.name, state.quorum
    evict = EvictReplica(replica=name, generation=group.generation, reason=reason)
    if name not in quorum.members:
        return [evict]
    others = tuple(
        g.number
        for g in state.worlds.values()
        if g is not group and g.replica.name in quorum.members
    )
    fence = FenceAbort(quorum_id=quorum.quorum_id, groups=others, reason=reason)
    return [evict, fence] if others else [evict]


def list_spare_groups(state: JobState) -> list[WorldState]:
    """Return the spare groups that stand ready."""
    groups = [g for _, g in sorted(state.worlds.items()) if g.number not in state.barred]
    ready = [
        g for g in groups if not g.replica.active and not g.replica.leaving and g.phase == "running"
    ]
    return [g for g in ready if g.replica.name and not g.replica.absent]


def promote(state: JobState, reason: str) -> list[AnyAction]:
    """Release a spare that stands ready in the place of each active group that is away."""
    spares = list_spare_groups(state)
    away = [
        g
        for _, g in sorted(state.worlds.items())
        if g.replica.active and g.alive and g.replica.absent
    ]
    away += [g for _, g in sorted(state.worlds.items()) if g.phase == "failed" and g.replica.active]
    missing = count_missing(state)
    changed = False
    for spare in spares:
        if away:
            away.pop(0).replica.active = False
        elif missing > 0:
            missing -= 1
        else:
            break
        spare.replica.active = changed = True
    return [hold_groups(state, reason)] if changed else []


_OF_MACHINES = ("join", "invite", "revoke")
"""Only where others start the groups is there anything for another machine to do."""


class Quorum(Fixed):
    """Groups come and go; the ranks of one are fixed."""

    kind = "replica groups"

    def refuse(self, state: JobState, kind: str) -> str:
        """Return why there is no such command here, or not now; empty where there is.

        Groups are held at the lighthouse, which has nobody to hold before they begin.
        """
        if kind in ("probe", "restart") or (kind in _OF_MACHINES and not state.the_spec().served):
            return f"{kind} is not for a torchft job; see docs/torchft.md"
        if kind in ("pause", "resume") and state.phase != "running":
            return f"the job is {state.phase}"
        why = 'only perdure\'s own lighthouse can hold replicas (torchft.lighthouse = "perdure")'
        return _refuse_with_others(state, why) if kind == "pause" else ""

    def make_worlds(self) -> dict[int, WorldState]:
        """Return no world: each group begins with its node."""
        return {}

    def make_farewell(self, state: JobState) -> WorldState:
        """Return what is like none of the groups, and older than nothing that they run."""
        return WorldState(generation=state.generation)

    def list_asked(self, state: JobState) -> tuple[int, ...]:
        """Return the ranks of all groups that live and are no spares."""
        there = [group for _, group in sorted(state.worlds.items()) if group.alive]
        ranks_of = state.the_spec().ranks_of
        return tuple(
            rank for group in there if group.replica.active for rank in ranks_of(group.number)
        )

    def find_world_of(self, state: JobState, rank: int) -> WorldState | None:
        """Return the group that `rank` is in."""
        return state.worlds.get(rank // state.the_spec().nproc)

    def agrees(self, state: JobState) -> bool:
        """Return False: there is no world of all ranks."""
        return False

    def list_beside(self, started: Iterable[RanksStarted]) -> set[int]:
        """Return the generation that each group is in."""
        return set({event.node: event.generation for event in started}.values())

    def needs_agreement(self, kind: str) -> bool:
        """Return whether members have to agree, as they do on `set` and `checkpoint`."""
        return kind in ("set", "checkpoint")

    def refuse_step(self, state: JobState) -> str:
        """Return why no step can be agreed upon; empty where the lighthouse is perdure's own."""
        why = 'only with perdure\'s own lighthouse (torchft.lighthouse = "perdure")'
        mute = ", ".join(f"group {g.number} ({g.replica.name})" for g in list_mute_groups(state))
        if mute:
            return f"{mute}: no line `import perdure.torchft` in the script, or not on this machine"
        return _refuse_with_others(state, f"{why} can a step be agreed upon")

    def is_current(self, state: JobState, generation: int) -> bool:
        """Return True: groups have generations of their own, and their pace is told of none."""
        return True

    def refuse_saving(self, state: JobState) -> str:
        """Return why nothing can be saved; empty where the lighthouse is perdure's own."""
        if state.the_spec().served:
            return "groups that others start save by themselves"
        why = "who has the state is known to perdure's own lighthouse only (torchft.lighthouse)"
        return _refuse_with_others(state, why)

    def can_save(self, state: JobState) -> bool:
        """Return whether the members of a quorum are known: keys have no part in it."""
        return self.is_whole(state)

    def can_ask(self, state: JobState) -> bool:
        """Return whether the keys are known, and whom to ask."""
        return self.has_declared(state) and self.is_whole(state)

    def runs(self, state: JobState, node: int) -> bool:
        """Return whether the node's group runs, or is about to."""
        return state.worlds[node].alive

    def is_whole(self, state: JobState) -> bool:
        """The quorum in force is known, and every member of it can be asked."""
        quorum = state.quorum
        known = bool(quorum.members) and quorum.quorum_id >= quorum.needed
        there = len(state.list_members()) == len(quorum.members)
        return known and there and not list_mute_groups(state)

    def ask(self, state: JobState, kind: str) -> tuple[int, ...]:
        """Return the members of the quorum; to save, one of them: all have the same state."""
        quorum, members = state.quorum, state.list_members()
        asked = members[:1] if kind == "checkpoint" else members
        quorum.asked = {group.number: group.generation for group in asked}
        quorum.asked_quorum = quorum.quorum_id
        return tuple(rank for group in asked for rank in state.the_spec().ranks_of(group.number))

    def address(self, state: JobState, boundary: OpenBoundary, move: str) -> list[Addressed]:
        """Return those that were asked; of `set`, every group that runs."""
        spec, asked = state.the_spec(), state.quorum.asked
        mine = move == "prepare" or boundary.kind == "checkpoint"
        return [
            (group, f"@{number}", tuple(spec.ranks_of(number)))
            for number, group in sorted(state.worlds.items())
            if group.has_ranks and (not mine or asked.get(number) == group.generation)
        ]

    def list_bound(self, state: JobState, ranks: Collection[int]) -> set[int]:
        """Return those whose group is the same that was asked, and in the quorum."""
        asked, spec = state.quorum.asked, state.the_spec()
        members = [g for g in state.list_members() if asked.get(g.number) == g.generation]
        return {rank for g in members for rank in spec.ranks_of(g.number)}

    def map_settled(self, state: JobState, boundary: OpenBoundary) -> dict[str, int]:
        """Return the step and the group that saves: should it be lost, another one does."""
        return {"at_step": boundary.step, "generation": next(iter(state.quorum.asked.values()))}

    def is_in_force(self, state: JobState, change: OpenChange) -> bool:
        """Return whether nobody whom the change binds has come past its step without it."""
        asked = self.list_bound(state, change.ranks)
        return state.step > change.change.step or bool(asked and asked <= change.reached)

    def list_changed(self, state: JobState, change: OpenChange) -> list[int]:
        """Return those that the change is in force on, or that have promised it."""
        return sorted(change.reached | self.list_bound(state, change.ranks))

    def sets_at_once(self, state: JobState) -> bool:
        """Return True: the lighthouse and the controller need no step."""
        return True

    def has_declared(self, state: JobState) -> bool:
        """Return whether some group's script has declared its keys."""
        return state.steering.generation >= 0

    def tell(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the newest word to the lighthouse, which goes by it."""
        return [hold_groups(state, reason)] if state.worlds and not state.over else []

    def list_told_nodes(self, state: JobState, world: WorldState) -> tuple[int, ...]:
        """Return the group's own node."""
        return world.placement

    def complete(self, assignment: Assignment, world: WorldState) -> Assignment:
        """Say which replica group it is, and how often it has failed."""
        failures = world.failures.total
        return structs.replace(assignment, restart_count=failures, replica=world.number)

    def list_awaited_nodes(self, state: JobState, world: WorldState) -> set[int]:
        """Return the group's own node."""
        return set(world.placement)

    def announce(self, state: JobState, world: WorldState) -> tuple[list[AnyAction], str]:
        """Return the order that tells the lighthouse whose the store is, and why."""
        of_group = f"generation {world.generation} of group {world.number}"
        reason = f"{of_group}: its older ranks are gone"
        return [hold_groups(state, reason)], reason

    def locate(self, state: JobState, started: Started, generation: int, rank: int) -> int | None:
        """Return the node of the rank's group: that of its number, in every generation."""
        return rank // state.the_spec().nproc

    def again(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the newest word to the lighthouse once more."""
        return self.tell(state, reason)
