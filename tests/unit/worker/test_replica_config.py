"""Settings of a torchft script: at the agreed step, and with the state that a group heals from."""

import itertools
from typing import Any

import pytest

from perdure.model.errors import ConfigError, ProtocolError
from perdure.model.events import BoundaryAnswered, BoundaryReached, KeysDeclared
from perdure.model.orders import SendBoundary
from perdure.model.steering import Change, Steering
from perdure.worker.steering import boundary
from perdure.worker.torchft.settings import STATE_KEY, ReplicaConfig

NOTHING = Steering()


class Group:
    """A rank of a replica group of one, without torchft."""

    def __init__(
        self, group: int = 0, steering: Steering = NOTHING, orphan_s: float = 600.0
    ) -> None:
        self.step, self.quorum = 0, 1
        self.events: list[Any] = []
        self.asked: list[str] = []
        self.heard: list[float] = []
        self.states: dict[str, Any] = {}
        self.settings = ReplicaConfig()
        self.settings.join(
            rank=group,
            generation=group,
            nproc=1,
            emit=self.events.append,
            line=self,
            now=itertools.count(1.0).__next__,
            quorum_id=lambda: self.quorum,
            steering=steering,
            orphan_s=orphan_s,
        )
        self.config = self.settings.config
        self.config.declare("lr", float, default=0.1, min=0, on_change=self.heard.append)

    # As of the line to an agent.

    def query(self, boundary_id: str) -> None:
        self.asked.append(boundary_id)

    def signal(self, number: int) -> None:
        raise AssertionError("torchft's groups forward no signals")

    # As of a Manager.

    def current_step(self) -> int:
        return self.step

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.states[key] = (load, save)

    def begin(self, step: int, committed: bool = True) -> None:
        self.step = step
        self.settings.begin_step(self, committed=committed)

    def heal(self, peer: "Group") -> None:
        self.states[STATE_KEY][0](peer.states[STATE_KEY][1]())

    def take(self, move: Any, step: int, value: float, epoch: int = 1, group: int = 0) -> None:
        change = Change(epoch=epoch, step=step, values={"lr": value})
        self.settings.take(
            SendBoundary(
                id=f"b{epoch}.1@{group}",
                move=move,
                kind="set",
                step=step,
                ranks=(group,),
                generation=group,
                change=change,
                reason="",
            )
        )

    def find(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def test_a_promised_change_is_in_force_from_its_step_on() -> None:
    group = Group()
    group.begin(0, committed=False)
    assert group.find(KeysDeclared) == [], "its values are not yet the job's"
    group.begin(1)
    assert group.find(KeysDeclared)[0].values == {"lr": 0.1}
    group.take("prepare", 3, 0.5)
    answer = group.find(BoundaryAnswered)[0]
    assert (answer.ok, answer.step, answer.quorum_id) == (True, 1, 1)
    group.take("commit", 3, 0.5)
    group.begin(2)
    assert group.config.lr == 0.1
    group.begin(3)
    assert group.config.lr == 0.5
    assert group.heard == [0.5]
    assert group.find(BoundaryReached)[0].step == 3
    group.begin(3)  # The step was not committed, and is made again.
    assert group.heard == [0.5]


def test_a_healing_group_gets_values_and_promises() -> None:
    peer, late = Group(0), Group(1)
    for group in (peer, late):
        group.begin(0, committed=False)
    peer.begin(7)
    peer.take("prepare", 8, 0.5)
    peer.take("commit", 8, 0.5)
    peer.begin(8)
    peer.take("prepare", 10, 0.7, epoch=2)
    late.heal(peer)
    assert late.config.lr == 0.5
    assert late.config.epoch == 1
    late.take("commit", 8, 0.5, group=1)  # Late: it has it.
    late.take("commit", 10, 0.7, epoch=2, group=1)  # As its own agent tells it.
    late.begin(9)
    assert late.config.lr == 0.5
    late.begin(10)
    assert late.config.lr == 0.7
    assert late.asked == [], "it had the decision, and needed not wait"


def test_a_group_waits_for_a_decision_as_long_as_the_job_says(monkeypatch) -> None:
    for name in ("ASK_FIRST_S", "ASK_EVERY_S", "DROP_S"):
        monkeypatch.setattr(boundary, name, 0.001)
    group = Group(orphan_s=0.01)
    group.begin(1)
    group.take("prepare", 2, 0.5)
    with pytest.raises(ProtocolError, match=r"no decision on set b1\.1@0 at step 2"):
        group.begin(2)


def test_who_is_told_of_a_decision_without_having_been_asked_acts_upon_it_too() -> None:
    spare = Group(1)
    spare.begin(0, committed=False)
    spare.take("commit", 5, 0.5, group=1)
    spare.take("commit", 5, 0.5, group=1)
    assert [a.planned for a in spare.find(BoundaryAnswered)] == [True]
    spare.begin(5)
    assert spare.config.lr == 0.5


def test_what_older_lives_have_agreed_comes_at_its_step_and_never_twice() -> None:
    steering = Steering(changes=(Change(epoch=1, step=4, values={"lr": 0.4}),))
    again, peer = Group(1, steering), Group(0)
    for group in (again, peer):
        group.begin(0, committed=False)
    peer.begin(3)
    peer.take("prepare", 4, 0.4)
    peer.take("commit", 4, 0.4)
    peer.begin(4)
    again.heal(peer)
    again.begin(4)
    assert again.config.lr == 0.4
    assert again.heard == [0.4]


def test_a_rank_vetoes_what_it_cannot_do_and_late_declarations_are_refused() -> None:
    group = Group()
    group.begin(0)
    group.take("prepare", 3, -1.0)
    assert group.find(BoundaryAnswered)[0].refused
    with pytest.raises(ConfigError, match="after the first step"):
        group.config.declare("more", int, default=1)


def test_without_perdure_the_defaults_hold_and_peers_heal_all_the_same() -> None:
    alone = ReplicaConfig()
    alone.config.declare("lr", float, default=0.1)
    found: dict[str, Any] = {}

    class Manager:
        def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
            found[key] = (load, save)

        def current_step(self) -> int:
            return 0

    alone.begin_step(Manager(), committed=False)
    alone.begin_step(Manager(), committed=True)
    load, save = found[STATE_KEY]
    load(save())
    assert alone.config.lr == 0.1
