"""Random notices of random grace: who is warned leaves in time, and what dies is no failure.

The cluster is that of `test_elastic_settings_agree`: the real controller above the members' real
agreements. A node that was noticed is gone at its deadline, whatever has become of its members, and
comes back as another machine; some notices are withdrawn, some come twice, late, or as a mere risk.
"""

from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.properties.test_elastic_settings_agree import DEFAULT, RANKS, Cluster

from perdure.control.membership import membership_of
from perdure.model.events import (
    NodeLost,
    NodeRegistered,
    PreemptionNoticed,
    PreemptionWithdrawn,
    TimerFired,
)
from perdure.model.steering import Pace

STEP_S = 0.1
"""More than what any step takes in turns of 0.01 s."""


class Spot(Cluster):
    """Machines that are taken away."""

    def __init__(self, random: Random, graces_s: tuple[float, ...]) -> None:
        self.graces_s = graces_s
        self.gone: dict[int, float] = {}
        """Node -> when it goes away."""
        self.back: dict[int, float] = {}
        self.boots = self.caught = self.noticed = 0
        """Machines that came, members that were taken away, and notices."""
        super().__init__(random)

    def begin(self) -> None:
        """A new generation begins once every machine is there again, at the newest checkpoint.

        What came after that is lost and made again, with what has been agreed upon since.
        """
        for node in sorted(self.back):
            self.bring_back(node)
        start = self.saved[-1][0] if self.saved else 0
        self.ran = {step: value for step, value in self.ran.items() if step < start}
        self.members.clear()
        super().begin()

    def bring_back(self, node: int) -> None:
        del self.back[node]
        self.boots += 1
        boot = {"boot_id": f"b{self.boots}", "incarnation": f"a{self.boots}"}
        self.do(NodeRegistered(node=node, host="h", slots=1, generation=-1, **boot))

    def start(self, rank: int, joins: bool) -> None:
        assert not (joins and rank % RANKS in self.back), "started on a machine that is gone"
        super().start(rank, joins)

    def notice(self, node: int, **more: Any) -> None:
        grace_s = self.random.choice(self.graces_s)
        self.noticed += 1
        known = {"at_s": self.now, "grace_s": grace_s, "source": "spot", "id": "a"} | more
        self.do(PreemptionNoticed(node=node, **known))
        self.gone[node] = min(self.gone.get(node, self.now + grace_s), self.now + grace_s)

    def pass_time(self) -> None:
        """Fire timers, take machines away, and give others in their place."""
        due_s = self.machine.next_deadline()
        if due_s is not None and due_s <= self.now:
            pace = Pace(generation=self.generation, step=0, at_s=self.now, step_s=STEP_S)
            self.do(TimerFired(pace=pace))
        for node, gone_s in sorted(self.gone.items()):
            if self.now >= gone_s:
                self.take_away(node)
        for node, back_s in sorted(self.back.items()):
            if node in self.back and self.now >= back_s:
                self.bring_back(node)
        if self.machine.state.generation > self.generation:
            self.begin()

    def take_away(self, node: int) -> None:
        del self.gone[node]
        self.back[node] = self.now + 0.5
        generation = self.generation
        for rank in [r for r in self.members if r % RANKS == node]:
            if generation == self.generation and rank in self.members:
                self.caught += rank in membership_of(self.machine.state).list_asked(
                    self.machine.state
                )
                self.kill(rank)
        if node in self.back:
            self.do(NodeLost(node=node, at_s=self.now, reason="silent"))

    def command(self, kind: Any, **args: Any) -> None:
        """Nobody restores a machine that goes away."""
        if kind != "restore" or int(args["targets"][0]) not in {**self.gone, **self.back}:
            super().command(kind, **args)

    def act(self) -> None:
        what = self.random.random()
        node = self.random.randrange(RANKS)
        if not self.members:
            self.now += 0.01
        elif what < 0.01 and node not in self.gone and node not in self.back:
            self.notice(node)
        elif what < 0.012 and self.gone:
            node = self.random.choice(sorted(self.gone))
            event = PreemptionWithdrawn(node=node, at_s=self.now, source="spot", id="a")
            del self.gone[node]
            self.do(event)
        elif what < 0.014 and self.gone:
            self.notice(self.random.choice(sorted(self.gone)))
        elif what < 0.016:
            self.do(
                PreemptionNoticed(
                    node=node, at_s=self.now, grace_s=0.0, source="spot", id="r", certain=False
                )
            )
        elif what < 0.02:
            self.replace_controller()
        else:
            super().act()
        self.pass_time()

    def settle(self) -> None:
        """Let all that was noticed go, and others come."""
        while self.gone or self.back:
            self.now += 0.01
            self.pass_time()

    def take_turns(self) -> None:
        """Everybody comes by once."""
        self.now += 0.01
        for rank in sorted(self.members):
            if rank in self.members:
                self.members[rank].hear(order=True)
                self.members[rank].hear(order=False)
                self.members[rank].move()
                self.tell(rank)
        self.pass_time()


@given(st.integers(0, 10**9))
@example(540)  # A member of an epoch that had broken was taken for one that trains (T13).
@example(709)
@settings(max_examples=8, deadline=None)
def test_notices_of_any_grace_end_no_job_and_split_no_step(seed: int) -> None:
    cluster = Spot(Random(seed), (0.0, 0.02, 0.1, 0.5, 2.0))
    for _ in range(700):
        cluster.act()
    cluster.settle()
    cluster.command("resume")
    cluster.run_fairly(cluster.is_settled)
    state = cluster.machine.state
    for step, value in cluster.ran.items():
        agreed = [c.values["lr"] for c in state.steering.changes if c.step <= step]
        assert value == [DEFAULT, *agreed][-1], f"step {step}"


@given(st.integers(0, 10**9))
@settings(max_examples=8, deadline=None)
def test_with_grace_enough_nobody_is_caught_and_nothing_fails(seed: int) -> None:
    random = Random(seed)
    cluster = Spot(random, (1.0, 2.0, 5.0))
    for _ in range(1500):
        cluster.take_turns()
        free = (
            not cluster.gone
            and not cluster.back
            and len(membership_of(cluster.machine.state).list_asked(cluster.machine.state)) == RANKS
        )
        if free and random.random() < 0.1:
            for node in random.sample(range(RANKS), random.choice((1, 1, 2))):
                cluster.notice(node)
        if random.random() < 0.01:
            cluster.replace_controller()
    assert cluster.noticed >= 2
    assert cluster.caught == 0
    assert cluster.machine.state.failures.kept == []
    assert cluster.generation == 0
    assert max(cluster.ran) > 100
