"""A world of all its ranks or of none: whatever is lost, the next generation is formed."""

from collections.abc import Collection

from perdure.control.job import JobState
from perdure.control.outcome import Outcome
from perdure.control.world import WorldState
from perdure.model.actions import AnyAction
from perdure.model.events import NodeRegistered, RankExited
from perdure.model.orders import Assignment
from perdure.model.verdicts import Verdict

GONE = "its ranks are gone, keeper and all"


class Fixed:
    """Nobody comes, nobody leaves."""

    def refuse(self, kind: str) -> str:
        """Every command is for it."""
        return ""

    def needs_agreement(self, kind: str) -> bool:
        """Its ranks do everything together."""
        return True

    def refuse_step(self, state: JobState) -> str:
        """A script that takes no part cannot promise anything."""
        if state.world.stepping and not state.world.joined:
            return "the script does not call perdure.init(), so no step can be agreed upon"
        return ""

    def can_ask(self, state: JobState) -> bool:
        """All ranks train, and take part."""
        return state.agrees

    def sets_at_once(self, state: JobState) -> bool:
        """What ranks can agree upon, they do."""
        return bool(self.refuse_step(state))

    def has_declared(self, state: JobState) -> bool:
        """The newest generation has, or trains without."""
        waits = state.world.joined and state.steering.generation < state.world.generation
        return state.world.stepping and not waits

    def tell(self, state: JobState, reason: str) -> list[AnyAction]:
        """Nobody but the ranks themselves has to know."""
        return []

    def find_told(self, state: JobState, world: WorldState) -> tuple[int, ...]:
        """All nodes are told: one that runs nothing stands ready."""
        return tuple(sorted(state.nodes))

    def complete(self, assignment: Assignment, world: WorldState) -> Assignment:
        """Its nodes have to know no more."""
        return assignment

    def find_waited(self, state: JobState, world: WorldState) -> set[int]:
        """A lost node cannot say that it is empty, and is waited for only where it has ranks.

        The others have lost their store and their peers, and it ends them before anything else
        once it is back.
        """
        return set(state.nodes) - (set(state.lost) - set(world.placement))

    def announce(self, state: JobState, world: WorldState) -> tuple[list[AnyAction], str]:
        """Nothing has to be said before."""
        return [], f"generation {world.generation}: all older ranks are gone"

    def deadline(self, state: JobState) -> float | None:
        """Nothing is due."""
        return None

    def fire(self, state: JobState, now: float, busy: Collection[int]) -> Outcome:
        """Nothing is due."""
        return Outcome()

    def again(self, state: JobState, reason: str) -> list[AnyAction]:
        """Nothing is open."""
        return []

    def lose(
        self, state: JobState, node: int, why: str, begun: Collection[int] | None = None
    ) -> Outcome:
        """All go with one."""
        return Outcome(broken=why)

    def come_back(self, state: JobState, event: NodeRegistered) -> Outcome:
        """A node that has nothing of this generation has lost its ranks, unless they had ended."""
        world = state.world
        if world.phase != "running" or event.node not in world.placement:
            return Outcome()
        if event.generation >= world.generation:
            return Outcome()
        ranks = state.the_spec().ranks_of(world.placement.index(event.node))
        lost = self.lose(state, event.node, GONE, ())
        return lost if any(rank not in world.exits for rank in ranks) else Outcome(lost.actions)

    def leave(self, state: JobState, now: float, event: RankExited) -> Outcome:
        """Whoever has ended well is done."""
        state.world.elastic.finished.add(event.record.rank)
        return Outcome()

    def has_ended(self, state: JobState) -> bool:
        """Every rank has to end well."""
        exits = state.world.exits
        return set(exits) >= set(state.ranks) and not any(end.failed for end in exits.values())

    def stand_in(self, state: JobState, now: float, reason: str, *, freed: bool = False) -> Outcome:
        """Nobody can."""
        return Outcome(broken="its members are fixed")

    def end_hung(self, state: JobState, verdict: Verdict) -> list[AnyAction]:
        """The others cannot go on without it."""
        return []


FIXED = Fixed()
