"""A world of all its ranks or of none: whatever is lost, the next generation is formed.

`Fixed` is also what is asked of every kind of world: the others answer otherwise where they differ.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from perdure.control.job import JobState
from perdure.control.membership.members import node_of_member
from perdure.control.promises import OpenBoundary, OpenChange
from perdure.control.world import WorldState
from perdure.model.events import ActionWithheld, NodeLost, NodeRegistered, RankExited, RanksStarted
from perdure.model.failures import Cause
from perdure.model.orders import AnyAction, Assignment, CordonNode
from perdure.model.verdicts import Verdict

GONE = "its ranks are gone, keeper and all"
Addressed = tuple[WorldState, str, tuple[int, ...]]
"""A world, what the id of an agreement has more there, and those of its ranks that are told."""
Started = Mapping[int, Mapping[int, int]]
"""Generation -> rank -> the node that has started it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from an event for a world that it may have broken."""

    actions: list[AnyAction] = field(default_factory=list)
    """What is to be done where the world goes on."""
    broken: str = ""
    """Why the world cannot go on as it is, and another has to be formed; empty where it goes on."""


class Fixed:
    """The membership of a world that nobody joins and nobody leaves."""

    kind: Literal["one world", "replica groups"] = "one world"

    # --- who is there ------------------------------------------------------------------------

    def make_worlds(self) -> dict[int, WorldState]:
        """Return a new job's worlds, by number: one."""
        return {0: WorldState()}

    def make_farewell(self, state: JobState) -> WorldState:
        """Return what is ended on every node in the end."""
        return state.world

    def list_asked(self, state: JobState) -> tuple[int, ...]:
        """Return whom agreements are made with: all ranks."""
        return state.ranks

    def list_fleeting(self, state: JobState) -> tuple[int, ...]:
        """Return those of them that may come and go while the others train on: here, nobody."""
        return ()

    def find_world_of(self, state: JobState, rank: int) -> WorldState | None:
        """Return the world that `rank` is in now; None where it is in none."""
        return state.world if rank in self.list_asked(state) else None

    def has_joined(self, state: JobState) -> bool:
        """Return whether every rank of this generation has called `perdure.init`."""
        return len(state.world.joined) == state.the_spec().world_size

    def agrees(self, state: JobState) -> bool:
        """Return whether the only world trains, and all its ranks take part in agreements."""
        world = state.world
        return world.phase == "running" and world.stepping and self.has_joined(state)

    def list_beside(self, started: Iterable[RanksStarted]) -> set[int]:
        """Return the older generations that live beside the newest: none."""
        return set()

    # --- what is done ------------------------------------------------------------------------

    def withhold(self, world: WorldState, event: ActionWithheld) -> list[AnyAction] | None:
        """Return the record that something is not done that was decided; None where it is."""
        return None

    def cordon(self, state: JobState, node: int, reason: str) -> list[AnyAction]:
        """Leave `node` out from now on, while another can stand in."""
        if node in state.cordoned:
            return []
        state.cordoned[node] = reason
        return [CordonNode(node=node, reason=reason)]

    def free(self, state: JobState, node: int, who: str, reason: str) -> list[AnyAction]:
        """Let `node` run ranks again, if it does not for the controller's own cordon."""
        own = node in state.cordoned and node not in state.barred
        return state.release(node, who, reason) if own else []

    # --- commands ----------------------------------------------------------------------------

    def refuse(self, state: JobState, kind: str) -> str:
        """Return why there is no such command here; empty where there is, as for all of them."""
        return ""

    def needs_agreement(self, kind: str) -> bool:
        """Return whether ranks have to agree before a command is begun: all begin it together."""
        return True

    def refuse_step(self, state: JobState) -> str:
        """Return why no step can be agreed upon; empty where one can, or will.

        A script that takes no part cannot promise anything.
        """
        if state.world.stepping and not state.world.joined:
            return "the script does not call perdure.init(), so no step can be agreed upon"
        return ""

    def refuse_saving(self, state: JobState) -> str:
        """Return why no checkpoint can be made; empty where one can, or will."""
        if state.world.stepping and not state.world.joined:
            return "the script does not call perdure.init(), so perdure cannot save its state"
        return ""

    def can_save(self, state: JobState) -> bool:
        """Return whether all whom a checkpoint takes can be asked now."""
        return self.agrees(state)

    def begins_saves(self, state: JobState) -> bool:
        """Return whether the controller begins the checkpoints that are due by time."""
        return self.agrees(state)

    def sets_at_once(self, state: JobState) -> bool:
        """Return whether what only perdure's own parts look at is set without a step.

        What ranks can agree upon, they do; but once a hang was found they may come to no step, and
        how long it is left alone is what somebody wants to set then.
        """
        return state.world.stacks is not None or bool(self.refuse_step(state))

    def has_declared(self, state: JobState) -> bool:
        """Return whether it is known which keys the script has: or it trains without any."""
        waits = state.world.joined and state.steering.generation < state.world.generation
        return state.world.stepping and not waits

    # --- agreements --------------------------------------------------------------------------

    promised: tuple[str, ...] = ("set", "pause")
    """Kinds of agreements that are carried out once they are decided, whoever dies."""

    def is_current(self, state: JobState, generation: int) -> bool:
        """Return whether a pace that was told of `generation` is that of the ranks there are."""
        return generation == state.world.generation

    def can_ask(self, state: JobState) -> bool:
        """Return whether all who would have to promise can be asked now: they train."""
        return self.agrees(state)

    def runs(self, state: JobState, node: int) -> bool:
        """Return whether `node` has a part in what runs."""
        return node in state.world.placement

    def can_leave(self, state: JobState) -> bool:
        """Return whether nodes can be left at a step that is agreed upon now: all have joined."""
        return self.has_joined(state)

    def is_whole(self, state: JobState) -> bool:
        """Return whether it is known whom to ask."""
        return True

    def ask(self, state: JobState, kind: str) -> tuple[int, ...]:
        """Return the ranks that have to promise: all."""
        return self.list_asked(state)

    def address(self, state: JobState, boundary: OpenBoundary, move: str) -> list[Addressed]:
        """Return who is told a move of an agreement."""
        return [(state.world, "", boundary.ranks)]

    def list_bound(self, state: JobState, ranks: Collection[int]) -> set[int]:
        """Return who of `ranks`, which were asked, still counts."""
        return set(ranks)

    def map_settled(self, state: JobState, boundary: OpenBoundary) -> dict[str, int]:
        """Return what a command's agreement has settled, now that all have promised."""
        return {"at_step": boundary.step} if boundary.kind in self.promised else {}

    def is_in_force(self, state: JobState, change: OpenChange) -> bool:
        """Return whether a change is, on every rank that has promised it and is there still."""
        promised = state.ranks if change.generation < state.generation else change.ranks
        return bool(change.reached) and change.reached >= set(promised) & set(
            self.list_asked(state)
        )

    def list_changed(self, state: JobState, change: OpenChange) -> list[int]:
        """Return the ranks that a change is in force on, or will be."""
        return list(self.list_asked(state))

    # --- formation ---------------------------------------------------------------------------

    def tell(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the newest word to whoever says who trains together: here, nobody does."""
        return []

    def list_told_nodes(self, state: JobState, world: WorldState) -> tuple[int, ...]:
        """Return the nodes that are told what `world` shall run.

        All are: one that runs nothing stands ready.
        """
        return tuple(sorted(state.nodes))

    def complete(self, assignment: Assignment, world: WorldState) -> Assignment:
        """Return an assignment of `world` with all that its nodes have to know."""
        return assignment

    def list_awaited_nodes(self, state: JobState, world: WorldState) -> set[int]:
        """Return the nodes on which nothing older may live before `world` starts.

        A lost node cannot say that it is empty, and is waited for only where it has ranks. The
        others have lost their store and their peers, and it ends them before anything else
        once it is back.
        """
        return set(state.nodes) - (set(state.lost) - set(world.placement))

    def announce(self, state: JobState, world: WorldState) -> tuple[list[AnyAction], str]:
        """Return what is said before `world` starts, and why it does."""
        return [], f"generation {world.generation}: all older ranks are gone"

    def locate(self, state: JobState, started: Started, generation: int, rank: int) -> int | None:
        """Return the node that runs `rank` in `generation`; None where nobody can know any more."""
        known = started.get(generation, {}).get(rank)
        if known is None and generation == state.generation and rank >= 0:
            return node_of_member(state, rank)
        return known

    # --- what becomes of it ------------------------------------------------------------------

    def goes_on(self, state: JobState) -> bool:
        """Return whether the others go on in place without who is lost, or leaves."""
        return False

    def goes_on_without(self, state: JobState, verdict: Verdict) -> bool:
        """Return whether one process alone is concerned by `verdict`, and the others go on."""
        return False

    def moving_s(self, state: JobState) -> float:
        """Return how long members take at most to come into a world, as far as was seen."""
        return 0.0

    def fill(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the order that starts new members where there are none."""
        return []

    def deadline(self, state: JobState) -> float | None:
        """Return when something of the membership is due: here, nothing ever is."""
        return None

    def fire(self, state: JobState, now: float, busy: Collection[int]) -> Outcome:
        """Return what is due; the world may have to be formed anew."""
        return Outcome()

    def again(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return what may have been lost with the last controller; safe to repeat."""
        return []

    def lose(
        self, state: JobState, node: int, why: str, begun: Collection[int] | None = None
    ) -> Outcome:
        """Count what a node ran as lost; where a member was among it, the world is broken.

        All go with one.
        """
        return Outcome(broken=why)

    def miss(self, state: JobState, now: float, event: NodeLost, why: str) -> Outcome:
        """Do without a node that has fallen silent."""
        return self.lose(state, event.node, why)

    def come_back(self, state: JobState, event: NodeRegistered) -> Outcome:
        """Return what follows where a node registers: ranks of the world may be gone with it.

        One that has nothing of this generation has lost its ranks, unless they had ended.
        """
        world = state.world
        if world.phase != "running" or event.node not in world.placement:
            return Outcome()
        if event.generation >= world.generation:
            return Outcome()
        ranks = state.the_spec().ranks_of(world.placement.index(event.node))
        lost = self.lose(state, event.node, GONE, ())
        return lost if any(rank not in world.exits for rank in ranks) else Outcome(lost.actions)

    def leave(self, state: JobState, now: float, event: RankExited) -> Outcome:
        """Let go of a member that has ended well: nobody waits for it any more."""
        state.world.elastic.finished.add(event.record.rank)
        return Outcome()

    def has_ended(self, state: JobState) -> bool:
        """Return whether all whom the job needs have ended well: every rank has to."""
        exits = state.world.exits
        return set(exits) >= set(state.ranks) and not any(end.failed for end in exits.values())

    def stand_in(
        self, state: JobState, now: float, found: Cause, reason: str, *, freed: bool = False
    ) -> Outcome:
        """Go on in place without who is lost, spares in their stead: here nobody can."""
        return Outcome(broken="its members are fixed")

    def end_one(self, state: JobState, rank: int | None, found: Cause, why: str) -> list[AnyAction]:
        """Return the order that ends a process, if there is one without which others go on."""
        return []
