"""Which replica groups train together next: the decision behind torchft's lighthouse.

At every step, each replica group asks for a quorum and waits for the answer. `Quorums` takes these
requests, heartbeats, deaths, and the controller's orders. It returns the answers, and to whom they
go. A quorum is formed as soon as all members of the last one have asked. A member is not waited for
any longer if it is dead, or:

- *stopped*: its process is in state T, and no heartbeat came for `silent_s`;
- *silent*: no heartbeat came for `heartbeat_s`, or for `silent_s` after one of its collectives
  broke. If its agent has just seen it run, it has as long as a late member: a busy machine delays
  heartbeats;
- *late*: its heartbeats go on, but it neither asks nor waits in a collective while others wait.

A late member is reported at once. That proves nothing, because it may validate or save. The others
wait as long as torchft would, and longer if its own pauses were longer. With `hung_s` in the job
file, they wait so much beyond the longest silence that ended. A declared busy phase does not count.

A member that is left out while it lives may come back. It may have committed a step that the others
have made again without it. Two replicas at one step would then differ, and nobody would notice. So
only members of the newest quorum are believed. Any other member has to heal from one of them,
whatever step it names.

If a member is left out, those who wait for it in a collective are released. `Fenced` has the id of
the quorum, so that newer process groups are left alone. Newcomers join at the next quorum. Nobody
waits for them, except before the first quorum.

If others start the groups (`QuorumConfig.elsewhere`), names tell groups apart, and silence means
death. A new life of a group ends the one before. If that one was heard a moment ago, its next
heartbeat is waited for, because two scripts may have one name.

Pure: time is an argument. There is one lighthouse, so no majority is asked for.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from perdure.control.lighthouse.evicted import Evicted
from perdure.control.lighthouse.names import Names
from perdure.control.lighthouse.outputs import (
    Answered,
    Fenced,
    Formed,
    Late,
    LeftOut,
    Output,
    Seen,
    Stands,
)
from perdure.control.lighthouse.patience import QuorumConfig, Silences
from perdure.model.bus.lighthouse import Member, set_step
from perdure.model.orders import ReplicaGroup

_GAP_KEPT = 0.95
_GAPS = 3.0
"""A member is silent after so many times the longest gap between its heartbeats of late."""
_TRUSTED_AFTER = 2
"""Quorums after which a member's steps are no longer its first, which take longer."""
_DEADLOCK = 5.0
"""All wait for one another: broken up after this many times `hung_s`, where that is given."""
_FRESH_S = 2.0
"""What an agent has said of a process holds for so long."""
_TOLD_S_MAX = 7 * 86400.0
"""No group's word reaches further ahead."""
_GONE = 3.0
"""Of a group that others have started: silent for so many times `heartbeat_s`, it is gone."""
_ALIVE = 2.0
"""Heard within so many times `silent_s`, it may live."""


@dataclass(slots=True)
class Replica:
    """One life of one replica group, as the lighthouse knows it."""

    name: str
    store: str
    heard_s: float
    manager: str = ""
    """Where its manager listens."""
    ranks: int = 0
    """How many it has, where it has asked."""
    home: tuple[int, int] = (-1, -1)
    """Its group and the generation of its processes; -1 where its store is not one of ours."""
    asked: Member | None = None
    asked_s: float = 0.0
    token: int = -1
    quorums: int = 0
    """Formed with it."""
    out: bool = False
    """Left out while it lives; it heals when it comes back."""
    missed_s: float | None = None
    """Since when the others had waited for it in vain, where it was left out for that."""
    waiting_s: float | None = None
    """Since when it waits in a collective of the quorum in force, where it said so."""
    stopped: bool = False
    """Its process is in state T."""
    lives_s: float = -math.inf
    """When its agent has last seen it run."""
    busy_until_s: float = 0.0
    """When the busy phase ends that it has declared; 0 without one."""
    busy_s: float = 0.0
    """When it was last known to be in one."""
    timeout_s: float = 0.0
    """How long its manager waits in a collective; 0: not told yet."""
    late: bool = False
    """It was told of as late."""
    beat_s: float = -math.inf
    """When it was last heard itself, whatever was forgiven since."""
    gap_s: float = 0.0
    """The longest time between two of its heartbeats, of late: a busy machine is no silent one."""
    told: bool = False
    took: tuple[int, int] = (-1, 0)
    """Step and commit failures of its request that the last quorum answered."""

    @property
    def last_s(self) -> float:
        """Return when it was heard last, or was first spoken of."""
        return self.heard_s if self.beat_s == -math.inf else self.beat_s


@dataclass(slots=True)
class Quorums:
    """The machine; every method returns what follows from it."""

    config: QuorumConfig
    quorum_id: int = 0
    next_id: int = 1
    """The least id that a new quorum may have."""
    members: tuple[str, ...] = ()
    """The members of the quorum in force."""
    step: int = -1
    """The highest committed step in it."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    groups: dict[str, ReplicaGroup] = field(default_factory=dict)
    """By the address of their store."""
    reason: str = "nobody has asked yet"
    """Why there is no quorum at this moment."""
    _held: set[int] = field(default_factory=set)
    """Of these groups."""
    _evicted: Evicted = field(default_factory=Evicted)
    _last: tuple[Member, ...] = ()
    _formed_s: float | None = None
    _still_s: float = -math.inf
    """Until when we stood still last."""
    _lag_s: float = 0.0
    """For so long."""
    silences: Silences = field(default_factory=Silences)
    """How long members have waited for one another so far."""
    names: Names = field(default_factory=Names)
    """Of groups that others start."""
    _open: dict[str, float] = field(default_factory=dict)
    """Replicas of which it is open whether they are a group's next life, and when they came."""

    # --- in -----------------------------------------------------------------------------------

    def ask(self, now: float, token: int, member: Member) -> list[Output]:
        """Take a request for a quorum; `token` stands for the caller."""
        if member.replica in self._evicted:  # It is dead, or about to be: it may wait.
            if self.config.elsewhere:
                self._evicted.refuse(now, token, member.replica)
            return []
        replica = self._meet(now, member.replica)
        replica.store, replica.manager, replica.ranks = member.store, member.manager, member.ranks
        outputs: list[Output] = []
        if not replica.quorums or replica.out:
            outputs += self._settle(now, replica)
        outputs += self._arrive(now, replica)
        replica.heard_s, replica.beat_s = max(replica.heard_s, now), now
        waited = replica.waiting_s if member.commit_failures else None
        replica.asked, replica.token = member, token
        replica.asked_s = now if waited is None else min(waited, now)  # It has given it up.
        replica.waiting_s, replica.stopped = None, False
        again = (member.step, member.commit_failures) == replica.took
        if again and member.replica in self.members and not replica.out and self._last:
            replica.asked = None  # The answer was lost on its way: the same again.
            return [*outputs, Answered((token,), self.quorum_id, self._last)]
        return outputs + self.tick(now)

    def introduce(self, now: float, name: str) -> list[Output]:
        """Know a replica that others have started, and that has not asked yet."""
        if name in self._evicted:
            return []
        replica = self._meet(now, name)
        if replica.home[0] >= 0:
            return []
        return self._settle(now, replica) + self.tick(now)

    def is_open(self, name: str) -> bool:
        """Return whether it will only be seen in a moment which group a replica is."""
        return name in self._open

    def hear(self, now: float, name: str) -> list[Output]:
        """Take a heartbeat; one of a name that is not known yet tells nothing, and is not kept."""
        replica = self.replicas.get(name)
        if replica is None:
            return []
        gap_s = now - replica.heard_s
        back = now > self._silence_due(replica)
        replica.gap_s = max(_GAP_KEPT * replica.gap_s, min(gap_s, self.config.silent_s))
        replica.heard_s, replica.beat_s = max(replica.heard_s, now), now
        return self.tick(now) if self._open or (back and replica.asked is not None) else []

    def hang_up(self, now: float, token: int) -> list[Output]:
        """Forget what a caller that is gone had asked for."""
        self._evicted.hang_up(token)
        for replica in self.replicas.values():
            if replica.token == token:
                replica.asked, replica.token = None, -1
        return self.tick(now)

    def wait(
        self,
        now: float,
        generation: int,
        quorum_id: int,
        since_s: float,
        *,
        timeout_s: float = 0.0,
        over: bool = False,
    ) -> list[Output]:
        """Note that a group has waited in a collective of `quorum_id` since then.

        Its manager would for `timeout_s`. With `over` the wait has ended by itself.
        """
        replica = self._find_replica(generation)
        if replica is None or quorum_id != self.quorum_id or replica.asked is not None:
            return []
        if 0 < timeout_s <= _TOLD_S_MAX:
            replica.timeout_s = timeout_s
        if not over:
            if since_s < self._still_s:
                since_s += self._lag_s
            begun_s = now if self._formed_s is None else self._formed_s  # Never before its quorum.
            replica.waiting_s = min(max(begun_s, since_s), now)
            return self._arrive(now, replica) + self.tick(now)
        # Whoever it waited for has come, and all go on.
        outputs = [told for other in self._list_idle() for told in self._arrive(now, other)]
        for member in self._present():
            member.waiting_s = None
        return outputs

    def note_process(
        self,
        now: float,
        generation: int,
        *,
        stopped: bool,
        lives: bool = True,
        busy_until_s: float = 0.0,
    ) -> list[Output]:
        """Note what its agent says of a group's processes: in state T, alive, busy until then."""
        replica = self._find_replica(generation)
        if replica is None:
            return []
        was_busy = now < replica.busy_until_s
        replica.stopped = stopped
        replica.lives_s = now if lives and not stopped else -math.inf
        busy = busy_until_s > now and not stopped
        replica.busy_until_s = min(busy_until_s, now + _TOLD_S_MAX) if busy else 0.0
        if busy or was_busy:
            replica.busy_s = now
        return self.tick(now) if stopped else []

    def end(self, now: float, generation: int, reason: str, *, fence: bool) -> list[Output]:
        """Note that a rank of this generation has ended: its replica is gone for good."""
        replica = self._find_replica(generation)
        return [] if replica is None else self.evict(now, replica.name, reason, fence=fence)

    def evict(self, now: float, name: str, reason: str, *, fence: bool = True) -> list[Output]:
        """Forget a replica at once and for ever.

        Without `fence` nobody is interrupted: what it had to send to the others, it has sent.
        """
        known = name in self.replicas
        outputs = self._forget(now, name, reason, fence=fence)
        return outputs + self.tick(now) if known else []

    def _forget(self, now: float, name: str, reason: str, *, fence: bool = True) -> list[Output]:
        """Forget a replica for ever; what follows from that for the others is the next tick's."""
        if name in self._evicted or not name:
            return []
        self._evicted.add(name, reason)
        self._open.pop(name, None)
        replica = self.replicas.pop(name, None)
        if replica is None:
            return []
        if replica.asked is not None and self.config.elsewhere:
            self._evicted.refuse(now, replica.token, name)
        if name not in self.members or replica.out:
            return []
        return self._leave_out(replica, reason, fence=fence, silent=self.config.elsewhere)

    def regroup(self, now: float, groups: tuple[ReplicaGroup, ...]) -> list[Output]:
        """Take over what the controller says of the groups: stores, generations, who is held.

        Whose group was started again since is gone, though nobody may have been there to hear it.
        """
        self.groups = {group.store or str(group.group): group for group in groups}
        self._held = {group.group for group in groups if group.held}
        newest = {group.group: group.generation for group in groups}
        outputs: list[Output] = []
        for replica in list(self.replicas.values()):
            replica.told = False
            group, generation = replica.home
            if 0 <= generation < newest.get(group, -1):
                outputs += self.evict(now, replica.name, "its group was started again")
        return outputs + self.tick(now)

    def restore(
        self,
        now: float,
        quorum_id: int,
        members: tuple[Member, ...],
        homes: Mapping[str, tuple[int, int]],
    ) -> None:
        """Know again the quorum in force, after a restart: its members are waited for."""
        self.quorum_id, self._last = quorum_id, members
        self.members = tuple(member.replica for member in members)
        self.step = max((member.step for member in members), default=-1)
        for member in members:
            self.replicas[member.replica] = Replica(
                name=member.replica,
                store=member.store,
                heard_s=now,
                beat_s=now,
                manager=member.manager,
                home=homes.get(member.replica, (-1, -1)),
                quorums=_TRUSTED_AFTER + 1,
                took=(member.step, member.commit_failures),
            )

    def forgive(self, now: float, lag_s: float) -> None:
        """Shift all waits after we stood still for `lag_s`: nobody was silent, or waited in vain.

        The others may have stood still as well (a machine that was suspended).
        """
        self._still_s, self._lag_s = now, lag_s
        for replica in self.replicas.values():
            replica.heard_s = max(replica.heard_s, now)
            replica.asked_s = min(replica.asked_s + lag_s, now)
            if replica.waiting_s is not None:
                replica.waiting_s = min(replica.waiting_s + lag_s, now)
            if replica.missed_s is not None:
                replica.missed_s = min(replica.missed_s + lag_s, now)

    @property
    def whole(self) -> bool:
        """Whether all members of the quorum in force are in it still."""
        return len(self._present()) == len(self.members)

    def map_members(self) -> dict[str, tuple[int, int]]:
        """Return group and generation of the members of the quorum in force."""
        return {r.name: r.home for r in self.replicas.values() if r.name in self.members}

    def next_deadline(self) -> float | None:
        """Return when `tick` is wanted."""
        broken = self._is_broken()
        times = [self._silence_due(r, broken) for r in self._awaited()]
        refused_s = self._evicted.next_deadline()
        times += [] if refused_s is None else [refused_s]
        for name, came_s in self._open.items():
            times.append(max((self._over_due(r) for r in self._list_alike(name)), default=came_s))
        asking = [r.asked_s for r in self.replicas.values() if r.asked is not None]
        impatient_s = self._impatient_since()
        waiting = [r.waiting_s for r in self._present() if r.waiting_s is not None]
        if impatient_s is not None:
            missing = [r for r in self._awaited() if r.asked is None]
            times += chain.from_iterable(self._late_times(r, impatient_s) for r in missing)
        if asking and not self._present():
            times += [min(asking) + self.config.startup_s, min(asking) + self.config.alone_s]
            times += [self._gone_due(r) for r in self._list_lost(min(asking))]
        if waiting:
            first = min(waiting)
            late = [self._late_times(r, first, collective=True) for r in self._list_idle()]
            times += [max(overdue for overdue, _ in late)] if late else [first + self._deadlock_s()]
            times += [told for _, told in late]
        return min(times, default=None)

    # --- the decision -------------------------------------------------------------------------

    def tick(self, now: float) -> list[Output]:
        """Do what is due, or has become possible."""
        outputs: list[Output] = [*self._evicted.take_due(now)]
        for name in list(self._open):
            outputs += self._settle(now, self.replicas[name])
        broken = self._is_broken()
        for replica in self._awaited():
            silent_s = now - replica.heard_s
            if now > self._silence_due(replica, broken):
                stopped = replica.stopped
                why = "its process is stopped (state T)" if stopped else "no heartbeat"
                why = f"{why}, silent for {silent_s:.2f} s"
                outputs += self._leave_out(replica, why, silent=not stopped)
                broken = self._is_broken()
        outputs += self._end_hung(now)
        outputs += self._tell_gone(now)
        return outputs + self._tell_held() + self._form(now) + self._report_late(now)

    def _tell_gone(self, now: float) -> list[Output]:
        """Tell of those that nobody waited for, since they were in no quorum or held."""
        if not self.config.elsewhere or len(self.replicas) == len(self.members):
            return []
        gone = [
            replica
            for replica in self.replicas.values()
            if replica.home[0] >= 0 and not replica.out and replica.name not in self.members
            if now > self._gone_due(replica)
        ]
        outputs: list[Output] = []
        for replica in gone:
            why = f"no heartbeat, silent for {now - replica.heard_s:.2f} s"
            outputs += self._leave_out(replica, why, silent=True)
        return outputs

    def _report_late(self, now: float) -> list[Output]:
        """Tell, once each, of those whom others wait for for longer than they ever did."""
        waits = [r.waiting_s for r in self._present() if r.waiting_s is not None]
        impatient_s = self._impatient_since()
        since = min(waits) if waits else impatient_s
        outputs: list[Output] = []
        if since is None:
            return outputs
        for replica in self._list_idle():
            if replica.late or not self._may_join(replica):
                continue
            waited_s = self._waited_s(now, replica, since)
            if waited_s >= self.config.late_s + self.silences.expected_s and self._knows(replica):
                replica.late = True
                where = " in a collective" if waits else ""
                why = f"the others have waited for it{where} for {waited_s:.2f} s"
                outputs.append(Late(replica.name, self.group_of(replica), why, waited_s))
        return outputs

    def _arrive(self, now: float, replica: Replica) -> list[Output]:
        """It asks, or waits with the others: what they have waited for it is learned."""
        since = self._waits_since(replica)
        outputs: list[Output] = []
        waited_s = 0.0 if since is None else now - since
        busy = since is not None and replica.busy_s >= since
        if self._knows(replica) and not replica.stopped and not busy:
            self.silences.add(waited_s)
        if replica.late:
            replica.late = False
            why = f"has come after {waited_s:.2f} s" if since is not None else "has come"
            outputs.append(Late(replica.name, self.group_of(replica), why, waited_s, over=True))
        return outputs

    def _waits_since(self, replica: Replica) -> float | None:
        """Return since when a member of the last quorum waits for this one; None if nobody does.

        Nobody waits for one that was left out; but since when somebody had is not forgotten.
        """
        if replica.asked is not None or replica.missed_s is not None:
            return replica.missed_s
        if replica.name not in self.members:
            return None
        others = [r for r in self._awaited() if r is not replica]
        since = [r.waiting_s for r in others if r.waiting_s is not None]
        since += [r.asked_s for r in others if r.asked is not None]
        return min(since, default=None)

    def _tell_held(self) -> list[Output]:
        """Tell, once after each order about holds, of those who are held and ask."""
        asking = [(r, r.asked.step) for r in self.replicas.values() if r.asked is not None]
        held = [(r, step) for r, step in asking if not r.told and self.group_of(r) in self._held]
        for replica, _ in held:
            replica.told = True
        return [Stands(r.name, self.group_of(r), step) for r, step in held]

    def _form(self, now: float) -> list[Output]:
        ready = [r for r in self.replicas.values() if r.asked is not None and self._may_join(r)]
        broken = self._is_broken()
        ready = [r for r in ready if now <= self._silence_due(r, broken)]
        present = {r.name for r in self._present()}
        if any(r.asked.shrink_only for r in ready if r.asked is not None):
            ready = [r for r in ready if r.name in present]
        if not ready:
            self.reason = "nobody asks"
            return []
        first = min(r.asked_s for r in ready)
        outputs: list[Output] = []
        if present:
            since_s = self._impatient_since()
            missing = [r for r in self._awaited() if r.asked is None]
            if since_s is not None:
                late = self._list_overdue(now, missing, since_s)
                outputs = self._leave_late_out(now, late, since_s)
            left = [r.name for r in missing if not r.out]
            if left:
                self.reason = f"waiting for {', '.join(left)}"
                return outputs
        elif not self._may_begin(ready, now, first):
            self.reason = f"{len(ready)} of {self._expected()} groups are there"
            return []
        if len(ready) < self.config.min_replicas:
            self.reason = f"{len(ready)} replicas, and at least {self.config.min_replicas} needed"
            return outputs
        return outputs + self._answer(now, sorted(ready, key=lambda r: r.name))

    def _may_begin(self, ready: list[Replica], now: float, since_s: float) -> bool:
        """Whether a quorum may be formed though no member of the last one is present.

        Members that were left out, but are not known to be dead, have all the steps made so far:
        newcomers wait for one of them to come back before they begin from nothing.
        """
        if any(r.name in self.members for r in ready):
            return True
        waited_s = now - since_s
        if self._list_lost(now):
            return waited_s >= self.config.alone_s
        return len(ready) >= self._expected() or waited_s >= self.config.startup_s

    def _answer(self, now: float, ready: list[Replica]) -> list[Output]:
        asked = {r.name: r.asked for r in ready if r.asked is not None}
        believed = [asked[name].step for name in self.members if name in asked]
        top = max(believed or [member.step for member in asked.values()])
        members = tuple(
            set_step(m, top - 1) if believed and name not in self.members and m.step >= top else m
            for name, m in asked.items()
        )
        names = tuple(member.replica for member in members)
        failed = any(member.commit_failures > 0 for member in members)
        changed = names != self.members or failed or any(r.out for r in ready)
        outputs: list[Output] = []
        if changed:
            self.quorum_id = max(self.quorum_id + 1, self.next_id)
            recovering = tuple(m.replica for m in members if m.step != top)
            outputs.append(Formed(self.quorum_id, top, members, recovering))
        elif self._formed_s is not None:
            self.silences.add_interval(now - self._formed_s)
        self._formed_s, self.members, self._last, self.step = now, names, members, top
        self.reason = f"quorum {self.quorum_id} of {len(members)}"
        tokens = tuple(r.token for r in ready)
        for replica in ready:
            member = asked[replica.name]
            replica.took = (member.step, member.commit_failures)
            replica.asked, replica.token, replica.waiting_s = None, -1, None
            replica.out, replica.told, replica.quorums = False, False, replica.quorums + 1
            replica.missed_s = None
        for replica in self.replicas.values():
            replica.waiting_s = None
        return [*outputs, Answered(tokens, self.quorum_id, members)]

    def _end_hung(self, now: float) -> list[Output]:
        """Leave out who never came to a collective; break up those who wait for one another."""
        present = self._present()
        since = [r.waiting_s for r in present if r.waiting_s is not None]
        if not since:
            return []
        idle = self._list_idle()
        if idle:
            hung = self._list_overdue(now, idle, min(since), collective=True)
            all_hung = len(hung) == len(idle)
            return (
                self._leave_late_out(now, hung, min(since), " in a collective") if all_hung else []
            )
        # Who has not committed has given the collective up; else word of its end is on its way.
        alone = any(r.asked is not None and r.asked.commit_failures > 0 for r in present)
        if not alone and now - min(since) < self._deadlock_s():
            return []
        groups = tuple(sorted(self.group_of(r) for r in present if r.waiting_s is not None))
        for replica in present:
            replica.waiting_s = None
        why = "a peer has given the collective up" if alone else "all wait for one another"
        return [Fenced(self.quorum_id, groups, why)]

    def _leave_late_out(
        self, now: float, late: Iterable[Replica], since_s: float, where: str = ""
    ) -> list[Output]:
        """Leave out those for whom the others have waited in vain since then."""
        why = f"the others have waited for it{where} for {now - since_s:.2f} s"
        return [o for each in late for o in self._leave_out(each, why, missed_s=since_s)]

    def _leave_out(
        self,
        replica: Replica,
        reason: str,
        *,
        fence: bool = True,
        missed_s: float | None = None,
        silent: bool = False,
    ) -> list[Output]:
        replica.out, replica.waiting_s = True, None
        replica.late, replica.missed_s = False, missed_s
        group = self.group_of(replica)
        left = LeftOut(
            replica.name,
            group,
            reason,
            replica.stopped,
            silent,
            replica.home[1],
            replica.last_s if silent else 0.0,
        )
        if replica.name not in self.members or not fence:
            return [left]
        self._stand_in()
        groups = {self.group_of(r) for r in self._present()}
        groups |= set() if replica.name in self._evicted else {group}  # It may hang as well.
        return [left, Fenced(self.quorum_id, tuple(sorted(groups)), f"{replica.name}: {reason}")]

    def _stand_in(self) -> None:
        """Release the first spare that is ready, as the controller has said once and for all.

        It will say so itself in a moment; but the next quorum is formed before that.
        """
        ready = {self.group_of(r) for r in self.replicas.values() if r.asked is not None}
        spares = [g for g in self.groups.values() if g.spare and g.group in ready]
        if spares:
            chosen = min(spares, key=lambda group: group.group)
            released = msgspec.structs.replace(chosen, held=False, spare=False)
            self.groups[chosen.store] = released
            self._held.discard(chosen.group)

    # --- who is who ---------------------------------------------------------------------------

    def _meet(self, now: float, name: str) -> Replica:
        """Return the replica of this name, which may be new; forget those long gone."""
        if name not in self.replicas:
            for old in list(self.replicas.values()):
                silent = now - old.heard_s > self.config.startup_s
                asks = old.asked is not None  # Where its machine is gone, nobody hangs up.
                if silent and old.name not in self.members and self.config.elsewhere >= asks:
                    del self.replicas[old.name]
                    self._open.pop(old.name, None)
                    if asks:
                        self._evicted.refuse_silent(now, old.token, old.name)
            self.replicas[name] = Replica(name, "", now)
        return self.replicas[name]

    def _settle(self, now: float, replica: Replica) -> list[Output]:
        """Know which life of which group has come, and tell of it; of a newcomer once that is seen.

        The next life of a group that others start is the end of the one before. Two scripts may
        have one name, though, and whoever trains is not ended by the other one: the heartbeats of
        one that was heard a moment ago are waited for, and a dead one sends none.
        """
        if not self.config.elsewhere:
            known = self.groups.get(replica.store)
            if known is not None:
                replica.home = (known.group, known.generation)
        if not self.config.elsewhere or replica.home[0] >= 0:
            return [self._introduce(replica)]
        name, _, life = replica.name.rpartition(":")
        came_s = self._open.pop(replica.name, now)
        alike = self._list_alike(replica.name)
        if any(r.beat_s > came_s for r in alike):
            name = ""  # They are two.
        elif any(now < self._over_due(r) for r in alike):
            self._open[replica.name] = came_s
            return []
        others = [r for r in self.replicas.values() if r is not replica and r.home[0] >= 0]
        present = {r.home[0] for r in others if now < self._gone_due(r)}
        kept = {*self._held, *(r.home[0] for r in others)}  # One that is silent may come back.
        replica.home = self.names.place(f"{name}:{life}" if name else life, present, kept)
        ended: list[Output] = []
        for before in [r for r in others if r.home[0] == replica.home[0]]:
            why = f"its group was started again, {now - before.last_s:.2f} s after it was heard"
            ended += self._forget(now, before.name, why)
        return [*ended, self._introduce(replica)]

    def _introduce(self, replica: Replica) -> Seen:
        group, life = self.group_of(replica), replica.home[1]
        return Seen(replica.name, group, life, replica.manager, replica.ranks)

    def _list_alike(self, name: str) -> list[Replica]:
        """Return the lives that are known of a group that others start, by the name of another."""
        group = name.rpartition(":")[0]
        known = [r for r in self.replicas.values() if group and r.home[0] >= 0 and r.name != name]
        return [r for r in known if r.name.rpartition(":")[0] == group]

    def _over_due(self, replica: Replica) -> float:
        """Return when it is over, should it not be heard until then."""
        stood_s = self._lag_s if self._still_s > replica.beat_s else 0.0
        return replica.beat_s + stood_s + max(_ALIVE * self.config.silent_s, _GAPS * replica.gap_s)

    def group_of(self, replica: Replica) -> int:
        """Return the group of a replica: by its store, or by the digits at the end of its name.

        The digits are torchft's own way to tell (`train_ddp_2`), for a script that makes its own
        store. Of groups that others start `names` tells.
        """
        if self.config.elsewhere:
            return replica.home[0]
        known = self.groups.get(replica.store)
        if known is not None:
            return known.group
        digits = re.search(r"(\d+)$", replica.name.partition(":")[0])
        group = int(digits[1]) if digits else -1
        return group if any(g.group == group for g in self.groups.values()) else -1

    def _find_replica(self, generation: int) -> Replica | None:
        """Return the replica that the processes of `generation` are."""
        if self.config.elsewhere:
            return self.find_life(generation)
        known = next((g for g in self.groups.values() if g.generation == generation), None)
        if known is None:
            return None
        mine = [r for r in self.replicas.values() if r.store == known.store]
        if not mine:
            mine = [r for r in self.replicas.values() if self.group_of(r) == known.group]
        return max(mine, key=lambda r: r.heard_s, default=None)

    def find_life(self, life: int) -> Replica | None:
        """Return the replica that is this life of a group that others start."""
        return next((r for r in self.replicas.values() if r.home[1] == life >= 0), None)

    def _may_join(self, replica: Replica) -> bool:
        return self.group_of(replica) not in self._held and replica.name not in self._open

    def _expected(self) -> int:
        """Return how many groups the first quorum waits for."""
        if self.config.elsewhere:
            return self.config.min_replicas
        return sum(not group.held for group in self.groups.values())

    def _present(self) -> list[Replica]:
        """Return the members of the quorum in force that were not left out since."""
        found = (self.replicas.get(name) for name in self.members)
        return [replica for replica in found if replica is not None and not replica.out]

    def _list_lost(self, now: float) -> list[Replica]:
        """Return the members of the last quorum that were left out and may come back.

        Of a group that others have started nobody tells that it has ended, but its silence.
        """
        known = [self.replicas[name] for name in self.members if name in self.replicas]
        if not self.config.elsewhere:
            return known
        return [r for r in known if now < self._gone_due(r)]

    def _gone_due(self, replica: Replica) -> float:
        return replica.heard_s + _GONE * self.config.heartbeat_s

    def _list_idle(self) -> list[Replica]:
        """Return those of them that neither ask nor wait for others."""
        return [r for r in self._present() if r.waiting_s is None and r.asked is None]

    def _awaited(self) -> list[Replica]:
        """Return those of them that the next quorum waits for."""
        return [replica for replica in self._present() if self._may_join(replica)]

    def _is_broken(self) -> bool:
        """Return whether a member has asked because a collective broke."""
        return any(r.asked and r.asked.commit_failures > 0 for r in self._present())

    def _silence_due(self, replica: Replica, broken: bool | None = None) -> float:
        """Return when its silence is enough, should it last until then.

        Who asks of many has asked before whether a collective is `broken`.
        """
        heard_s, config = replica.heard_s, self.config
        if replica.stopped:
            return heard_s + config.silent_s
        broken = self._is_broken() if broken is None else broken
        least_s = config.silent_s if broken else config.heartbeat_s
        due_s = heard_s + max(least_s, _GAPS * replica.gap_s)
        return min(max(due_s, replica.lives_s + _FRESH_S), heard_s + self._patience(replica))

    def _impatient_since(self) -> float | None:
        """Return since when somebody waits whose waiting counts: a member, or else a newcomer.

        A newcomer has to be far more patient, since members that are all busy with an evaluation
        look like members that are all hung, and it would begin without them from nothing.
        """
        members = [r.asked_s for r in self._awaited() if r.asked is not None]
        if members:
            return min(members)
        others = [r.asked_s for r in self.replicas.values() if r.asked and self._may_join(r)]
        since_s = max(min(others, default=0.0), self._formed_s or 0.0)
        return since_s + self.config.alone_s if others else None

    def _knows(self, replica: Replica) -> bool:
        """Return whether its first steps are over, which take longer than others."""
        return replica.quorums > _TRUSTED_AFTER

    def _patience(self, replica: Replica, *, collective: bool = False) -> float:
        """Return how long it is waited for; in a collective its peers' managers have their say."""
        told = [r.timeout_s for r in self._present() if r.timeout_s] if collective else []
        return self.config.compute_patience_s(
            self.silences.expected_s, told, known=self._knows(replica)
        )

    def _deadlock_s(self) -> float:
        config = self.config
        if config.hung_s:
            return _DEADLOCK * config.hung_s + self.silences.expected_s
        told = [r.timeout_s for r in self._present()]
        return max([config.timeout_s, self.silences.expected_s, *told])

    def _waited_s(self, now: float, replica: Replica, since_s: float) -> float:
        """Return for how long others have waited for it since then, its busy phases left out."""
        return now - max(since_s, replica.busy_s, min(now, replica.busy_until_s))

    def _list_overdue(
        self, now: float, missing: Iterable[Replica], since_s: float, *, collective: bool = False
    ) -> list[Replica]:
        """Return those of whom nobody would wait for longer."""
        return [
            r
            for r in missing
            if self._waited_s(now, r, since_s) >= self._patience(r, collective=collective)
        ]

    def _late_times(
        self, replica: Replica, since_s: float, *, collective: bool = False
    ) -> tuple[float, float]:
        """Return when it is waited for no longer, and when it is to be told of as late, or inf."""
        begin_s = max(since_s, replica.busy_s, replica.busy_until_s)
        overdue_s = begin_s + self._patience(replica, collective=collective)
        if replica.late or replica.waiting_s is not None or not self._knows(replica):
            return overdue_s, math.inf
        return overdue_s, begin_s + self.config.late_s + self.silences.expected_s
