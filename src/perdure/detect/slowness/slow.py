"""Slowness: evidence of stages, collectives and links, fused into `Straggler` and `CommSlow`.

Communication is judged first, because lateness grows under it as well. What the links show says
where; what the collectives show says that it matters; either alone takes longer. A verdict is
withdrawn when nothing unusual was seen for `CLEAR_S`, and may be acted upon once it lasted
`slow_action_s` and `ACTED_STEPS`, or longer where slowness of this job has ended by itself: work
that moves about (an expert in demand, long sequences) makes one rank slow after another, and no
node is to blame.
A rank that was kept from its CPU by neighbours is given much longer.
"""

import math
from collections.abc import Mapping

import msgspec

from perdure.detect.slowness.collectives import CollectiveWatch, Comm, group_peers
from perdure.detect.slowness.hosts import STARVED, HostWatch, Neighbours
from perdure.detect.slowness.links import Link, LinkWatch, Place
from perdure.detect.slowness.persistence import CLEAR_S, IMPACT, Persistence
from perdure.detect.slowness.shifts import STRAGGLER_EXCESS, Passed
from perdure.detect.slowness.stages import StageWatch, make_slowness
from perdure.detect.slowness.timed import DEVICE, keep_timed
from perdure.detect.watch import RankWatch
from perdure.model.events import VerdictReached, VerdictWithdrawn
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.signals.progress import NodeBeat
from perdure.model.verdicts import Culprit, Slowness, Verdict, VerdictKind

FUSED_S, LINK_S = 0.9, 2.2
"""How long links are suspected before a verdict: with slow collectives beside them, and alone."""
RECENT_S = 2.5
BUSY_PATIENCE = 3.0
"""Others' work on a host ends by itself more often than a slow host's slowness does: it is acted
upon after so many times as long."""
NEIGHBOUR_S = 30.0
"""A rank whose neighbours take its CPU is a straggler only after this long."""
ACCOUNTED = 0.5
"""What is blamed must account for so much of the time that is lost."""
UNPLACED_S = 12.0
"""A communicator of whose links none stands out, though they are watched, is slow after this."""
COSTED_S = 10.0
"""Over how long what a verdict costs is summed up, in steps where they are longer than a second;
once it is to be acted upon, over the time that it must have lasted, as far as samples are kept:
30 s of a collective (`Persistence`), 1,024 steps of a suspect (`stages.GAINED_KEPT`)."""
ACTED_STEPS = 20
"""Fewer steps than this are never acted upon: one rank has the longest sequences of three."""
UNMEASURED = 3.0
"""So many times that long again one waits for its cost to be measured, until it is told without:
nothing is done about it then, and the journal says so."""
GROWN = 0.1
"""A verdict that may be acted upon is told again once its share of the step changed by so much."""
PASSING, PASSING_S = 3.0, 1800.0
"""So many times as long as a slowness that ended by itself must one last to be acted upon; this
long is enough, and so many times what would be enough had none passed."""
EXPLAINED = "better explained"
"""How the reason of a withdrawal begins that says nothing of the slowness having ended."""
SURER = 0.2
"""A standing verdict is told again once it is so much surer."""
OPEN_MAX = 8
PROBED_MAX = 8


class SlowWatch:
    """Finds what is slow in one generation: a rank, a node, a link or a communicator."""

    def __init__(self, spec: JobSpec, generation: int, before: "SlowWatch | None" = None) -> None:
        """Begin a generation: all is learned anew but how long slowness lasted that passed.

        That is what the watch of the generation `before` knows. Of a controller before this one
        the verdicts are known that it withdrew, as far as a new detector hears of them
        (`control/memory.py`); what was never told is not.
        """
        self._spec, self._generation = spec, generation
        self._homes: dict[int, int] = {}
        """Rank -> the node that runs it, a spare one perhaps."""
        self._housed: dict[int, list[int]] = {}
        passed = None if before is None else before.stages.passed
        self.stages: StageWatch = StageWatch(self._home_of, passed)
        self.collectives = CollectiveWatch(self.stages.passed, spec.world_size)
        self.links = LinkWatch(self._node_of)
        self._neighbours = Neighbours()
        self._hosts = HostWatch()
        self._excused: dict[int, float] = {}
        """Node -> when something slow on it was last put down to its host."""
        self._hosted: dict[tuple[str, str], float] = {}
        """What was taken back because a busy host explains it, and when that was last so."""
        self._alone: dict[tuple[int, int], float] = {}
        """Link -> when it was last slow alone among the links of its busy machines."""
        self._open: dict[tuple[str, str], Verdict] = {}
        self._told: dict[tuple[str, str], float] = {}
        """When what an open verdict costs was last told."""
        self._passing: Passed = Passed() if before is None else before._passing
        """Verdicts about slowness that ended by itself, whatever was slow."""
        self._grown = -1
        self._spans_seen = False
        self.suspects: frozenset[int] = frozenset()
        """Nodes that deserve a closer look."""

    # --- what comes in ------------------------------------------------------------------------

    def reconfigure(self, config: DetectConfig) -> None:
        """Judge by `config` from now on."""
        self._spec = msgspec.structs.replace(self._spec, detect=config)

    def take(self, now: float, beat: NodeBeat) -> None:
        """Take what a heartbeat says of collectives, steps and links."""
        stages, collectives = self.stages, self.collectives
        for told in beat.ranks:
            progress = keep_timed(told)
            if progress.rank not in self._homes:
                self._homes[progress.rank] = beat.node
                self._housed.setdefault(beat.node, []).append(progress.rank)
            if progress.spans:
                collectives.take(now, progress)
                self._spans_seen = True
            if progress.stages:
                stages.take(now, progress.rank, progress.stages)
            if progress.proc.run_delay_s > 0.0 and (self._spans_seen or stages.seen):
                self._neighbours.take(progress.rank, beat.sent_s, progress.proc.run_delay_s)
        self._hosts.take(now, beat)
        if beat.sweep is not None:
            self.links.step_s = stages.step_s
            self.links.take(now, beat.sweep)

    def _node_of(self, rank: int) -> int:
        return self._homes.get(rank, self._spec.node_of(rank))

    def _home_of(self, rank: int) -> int:
        """Return what is replaced with a rank: its node, where there are several."""
        return self._node_of(rank) if self._spec.num_nodes > 1 else rank

    def _list_housed_ranks(self, node: int) -> tuple[int, ...]:
        return tuple(self._housed.get(node, ()))

    def _list_culprits(self, culprit: Culprit) -> tuple[int, ...]:
        """Return the rank that is to blame, or those of the node that is."""
        if culprit.rank is not None:
            return (culprit.rank,)
        return () if culprit.node is None else self._list_housed_ranks(culprit.node)

    def note(self, event: VerdictReached | VerdictWithdrawn) -> None:
        """Note that a verdict about slowness is in the journal, perhaps an earlier controller's."""
        verdict = event.verdict
        key = (verdict.kind, str(verdict.culprit))
        if isinstance(event, VerdictReached):
            self._open[key] = verdict
        else:
            self._open.pop(key, None)
            if not event.reason.startswith(EXPLAINED):
                self._passing.note(event.at_s, 0.0, event.at_s - verdict.confirmed_s)
                if verdict.kind == "Straggler" and verdict.slowness is not None:
                    shift = math.log(max(verdict.slowness.ratio, 1.0))
                    self.stages.passed.note(event.at_s, shift, event.at_s - verdict.first_seen_s)

    def open_verdicts(self) -> tuple[Verdict, ...]:
        """Return what is slow by an open verdict."""
        return tuple(self._open.values())

    # --- verdicts -----------------------------------------------------------------------------

    def look(
        self, now: float, watches: Mapping[int, RankWatch]
    ) -> list[VerdictReached | VerdictWithdrawn]:
        """Judge everything that came in since the last look."""
        self._prepare(watches)
        out: list[VerdictReached | VerdictWithdrawn] = [*self._forget_departed(now, watches)]
        live = sum(not w.gone for w in watches.values())
        self.stages.look(now, live)
        self.collectives.look(now, self.stages.pace)
        out += self._withdraw(now)
        comm = self._find_comm_slow(now)
        if comm is not None and self._is_explained(now, comm):
            comm = None
        if comm is not None:
            out += self._report(now, comm)
        if comm is None or comm.confidence < 0.7:
            for verdict in self._blame_stragglers(now, watches):
                if not self._is_explained(now, verdict):
                    out += self._report(now, verdict)
        out += self._judge_hosts(now)
        out += self._escalate(now)
        out += self._tell_again(now)
        self.suspects = self._list_suspect_nodes(now)
        return out

    def skip(self) -> None:
        """Keep little of what came in: it is not judged while something stands still."""
        self.stages.skip()
        self.collectives.skip()

    def _forget_departed(
        self, now: float, watches: Mapping[int, RankWatch]
    ) -> list[VerdictWithdrawn]:
        """Forget ranks that the world goes on without, and what was said of them alone.

        That they were slow has not ended by itself.
        """
        departed = self._homes.keys() - watches.keys()
        out = []
        for key, verdict in list(self._open.items()):
            blamed = self._list_culprits(verdict.culprit)
            if verdict.kind != "Straggler" or not blamed or not departed.issuperset(blamed):
                continue
            del self._open[key]
            reason = f"{EXPLAINED}: {verdict.culprit} is no longer in the world"
            out.append(VerdictWithdrawn(verdict=verdict, at_s=now, reason=reason))
        for rank in sorted(departed):
            self.stages.forget(rank)
            self.collectives.forget(rank)
            self._neighbours.forget(rank)
            self._housed[self._homes.pop(rank)].remove(rank)
        return out

    def _prepare(self, watches: Mapping[int, RankWatch]) -> None:
        collectives = self.collectives
        collectives.by_lateness = not self.stages.seen
        first = next(iter(watches.values()), None)
        if first is not None:
            declared = first.account.step >= 0
            collectives.step_s = first.cadence.typical_s if declared else self.stages.step_s
        if collectives.grown != self._grown:
            self._grown = collectives.grown
            comms, apart = collectives.comms(), collectives.point_to_point
            peers = group_peers(comms, apart, collectives.senders, self._spec.world_size)
            self.stages.set_peers(peers)

    def _report(self, now: float, verdict: Verdict) -> list[VerdictReached | VerdictWithdrawn]:
        key = (verdict.kind, str(verdict.culprit))
        known = self._open.get(key)
        if known is not None and verdict.confidence > known.confidence + SURER:
            self._open[key] = msgspec.structs.replace(
                verdict,
                first_seen_s=known.first_seen_s,
                confirmed_s=known.confirmed_s,
                actionable=known.actionable,
            )
            return [VerdictReached(verdict=self._open[key])]
        if known is not None or len(self._open) >= OPEN_MAX:
            return []
        out: list[VerdictReached | VerdictWithdrawn] = []
        for old_key, old in list(self._open.items()):
            replaced = verdict.kind == "CommSlow" == old.kind
            node = verdict.culprit.node
            if verdict.kind == "Straggler" == old.kind and node is not None:
                rank = old.culprit.rank
                replaced = rank is not None and self._node_of(rank) == node
            if verdict.kind == "CommSlow" and old.kind == "Straggler":
                replaced = old.confidence < verdict.confidence
            if replaced and old.confidence > verdict.confidence:
                return []
            if replaced:
                del self._open[old_key]
                reason = f"{EXPLAINED}: {verdict.reason}"
                out.append(VerdictWithdrawn(verdict=old, at_s=now, reason=reason))
        self._open[key] = verdict
        return [*out, VerdictReached(verdict=verdict)]

    def _withdraw(self, now: float) -> list[VerdictWithdrawn]:
        out = []
        for key, verdict in list(self._open.items()):
            if now - verdict.confirmed_s < CLEAR_S or self._lasts(now, verdict):
                continue
            del self._open[key]
            reason = f"nothing unusual for {CLEAR_S:g} s"
            if verdict.kind == "Straggler" and not self._compares(verdict.culprit):
                reason = f"{EXPLAINED}: ranks are compared anew"
            out.append(VerdictWithdrawn(verdict=verdict, at_s=now, reason=reason))
        return out

    def _compares(self, culprit: Culprit) -> bool:
        """Return whether it is known that a straggler is slow no more."""
        watch = self.stages if self.stages.seen else self.collectives.lateness
        return any(watch.compares(rank) for rank in self._list_culprits(culprit))

    def _lasts(self, now: float, verdict: Verdict) -> bool:
        if verdict.kind == "HostBusy":
            nodes = self._list_verdict_nodes(verdict)
            return any(self._hosts.explains(now, node, now - CLEAR_S) for node in nodes)

        def on(watch: Persistence | None) -> bool:
            return watch is not None and not watch.is_over(now, CLEAR_S)

        if verdict.kind == "CommSlow":
            comms = [comm for comm in self.collectives.comms() if on(comm.slow)]
            if self._neighbours_explain(comms):
                return False
            return bool(comms) or any(on(link.slow) for link in self.links.links.values())
        late = self.collectives.lateness.suspects
        culprits = self._list_culprits(verdict.culprit)
        return any(r in self.stages.suspects or r in late for r in culprits)

    @property
    def _wait_s(self) -> float:
        """How long a slowness must last after its verdict to be acted upon."""
        return max(self._spec.detect.slow_action_s, ACTED_STEPS * self.collectives.step_s)

    def _escalate(self, now: float) -> list[VerdictReached]:
        out = []
        for key, verdict in self._open.items():
            busy = verdict.kind == "HostBusy"
            wait_s = self._wait_s * (BUSY_PATIENCE if busy else 1.0)
            if busy and verdict.culprit.node is None:
                continue  # All are alike: there is nobody to replace.
            if not self._may_act(verdict.evidence):
                continue
            passing_s = PASSING * self._passing.longest_s(now, 0.0)
            outlasted_s = verdict.first_seen_s + min(passing_s, max(PASSING_S, PASSING * wait_s))
            due_s = max(verdict.confirmed_s + wait_s, outlasted_s)
            if not verdict.actionable and now >= due_s:
                slowness = self._measure(now, verdict, sure=True)
                waits = now < due_s + UNMEASURED * wait_s
                if slowness is None and verdict.slowness is not None and waits:
                    continue  # Too few of the last steps have shown it.
                evidence = {
                    **verdict.evidence,
                    "acted_after_s": round(now - verdict.confirmed_s, 3),
                }
                verdict = msgspec.structs.replace(
                    verdict, actionable=True, evidence=evidence, slowness=slowness
                )
                self._told[key] = now
                self._open[key] = verdict
                out.append(VerdictReached(verdict=verdict))
        return out

    def _tell_again(self, now: float) -> list[VerdictReached]:
        """What a standing verdict costs may grow or shrink: it is told anew where that matters."""
        out = []
        for key, verdict in self._open.items():
            told_s = self._told.setdefault(key, verdict.confirmed_s)
            if not verdict.actionable or now - told_s < self._spec.detect.slow_action_s:
                continue
            self._told[key] = now
            slowness = self._measure(now, verdict, sure=True)
            known = 0.0 if verdict.slowness is None else verdict.slowness.share_low
            if slowness is None or abs(slowness.share_low - known) < GROWN:
                continue
            self._open[key] = msgspec.structs.replace(verdict, slowness=slowness)
            out.append(VerdictReached(verdict=self._open[key]))
        return out

    # --- what it costs ------------------------------------------------------------------------

    def _measure(self, now: float, verdict: Verdict, *, sure: bool = False) -> Slowness | None:
        """Return how slow the culprit is and what that costs, as things stand.

        `sure` asks for what is good enough to be acted upon: noise makes anybody slow for a
        few steps.
        """
        step_s = max(1.0, self.collectives.step_s)
        window_s = self._wait_s if sure else COSTED_S * step_s
        if verdict.kind == "CommSlow":
            slow = [c for c in self.collectives.comms() if c.slow is not None]
            ends = verdict.culprit.link or ()
            mine = [c for c in slow if set(ends) <= set(c.ranks)]
            return self._measure_comms(now, mine or slow, window_s, sure=sure)
        ranks = self._list_culprits(verdict.culprit)
        found = [s for rank in ranks if (s := self.stages.measure(now, rank, window_s, sure=sure))]
        if found:
            return max(found, key=lambda s: s.share_low)
        late = self.collectives.lateness
        found = [s for rank in ranks if (s := late.measure(now, rank, window_s, sure=sure))]
        return max(found, key=lambda s: s.share_low, default=None)

    def _measure_comms(
        self, now: float, slow: list[Comm], window_s: float, *, sure: bool
    ) -> Slowness | None:
        """Return what slow communicators cost: what waits grew by, else what the pace fell by."""
        if sure:  # Collectives that are rare are few in a time that is long enough for others.
            units_s = [ACTED_STEPS * c.slow.unit for c in slow if c.slow and c.slow.unit > 1.0]
            window_s = max([window_s, *units_s])
        spans = [x for c in slow if c.slow and (x := c.slow.interval(now, window_s, sure=sure))]
        if not spans:
            return None
        excess = max(spans, key=lambda x: x[1])
        waits = self.stages.estimate_exposed(now, window_s, sure=sure)
        if waits is None:
            return _make_slowness(excess, self._compute_loss(slow))
        return _make_slowness(excess, waits[1], waits[0])

    def _make(
        self,
        now: float,
        kind: VerdictKind,
        culprit: Culprit,
        confidence: float,
        reason: str,
        began_s: float,
        evidence: dict[str, object],
    ) -> Verdict:
        pace = self.stages.pace
        if pace:
            evidence = {**evidence, "step_ratio": round(pace, 3)}
        if self._rests_on_device_times(kind) or self._rests_on_nccl(evidence):
            evidence = {**evidence, "stamps": DEVICE}
            if not self._may_act(evidence):
                evidence.pop("probe", None)  # A probe takes of the network that training needs.
        verdict = Verdict(
            kind=kind,
            culprit=culprit,
            generation=self._generation,
            first_seen_s=began_s,
            confirmed_s=now,
            confidence=confidence,
            reason=reason,
            activity="busy",
            evidence=evidence,
        )
        return msgspec.structs.replace(verdict, slowness=self._measure(now, verdict))

    def _rests_on_device_times(self, kind: VerdictKind) -> bool:
        """Return whether a verdict made now would not stand without times of a device's clock.

        A host is looked at because something is slow, which these times may be all that shows.
        """
        timed = [comm for comm in self.collectives.comms() if comm.stamps == DEVICE]
        if kind == "CommSlow":
            return any(comm.slow is not None for comm in timed)
        return bool(timed) and (kind == "HostBusy" or not self.stages.seen)

    def _rests_on_nccl(self, evidence: Mapping[str, object]) -> bool:
        """Return whether a link that is blamed is known by NCCL's plugin only."""
        links = evidence.get("links")
        return isinstance(links, list) and any(link["source"] != "kernel" for link in links)

    def _may_act(self, evidence: Mapping[str, object]) -> bool:
        return evidence.get("stamps") != DEVICE or self._spec.detect.act_on_device_times

    # --- hosts --------------------------------------------------------------------------------

    def _list_verdict_nodes(self, verdict: Verdict) -> set[int]:
        """Return the nodes that a verdict is about: the culprit's, or all of what is slow."""
        culprit = verdict.culprit
        if culprit.node is not None:
            return {culprit.node}
        if culprit.rank is not None:
            return {self._node_of(culprit.rank)}
        if culprit.link is not None:
            return {self._node_of(rank) for rank in culprit.link}
        if verdict.kind == "CommSlow":
            slow = [c for c in self.collectives.comms() if c.slow is not None]
            return {self._node_of(rank) for c in slow for rank in c.ranks}
        return set(self._housed)

    def _is_hosts(self, now: float, verdict: Verdict, within_s: float) -> bool:
        """Return whether what is slow lies on a host that is busy with others' work.

        A rank that got its CPU all the same is slow for another reason, and so is a link where
        the others of the same machines are not.
        """
        nodes = self._list_verdict_nodes(verdict)
        since_s = max(verdict.first_seen_s, now - within_s)
        busy = self._list_busy_nodes(now, nodes, since_s, self._estimate_lost(verdict))
        for node in nodes - busy:
            self._excused.pop(node, None)  # It seemed so before this much was lost.
        link = verdict.culprit.link
        mates = {mate for node in busy for mate in self._hosts.list_nodes_beside(node)}
        if link is not None and self.links.stands_out(now, link, mates):
            self._alone[link] = now
        if link is not None and now - self._alone.get(link, -1e9) <= CLEAR_S:
            return False
        ranks = [verdict.culprit.rank] if verdict.culprit.rank is not None else []
        ranks = ranks or [rank for node in busy for rank in self._list_housed_ranks(node)]
        starved = any(self._neighbours.is_starved(rank) for rank in ranks)
        if not busy or (verdict.kind == "Straggler" and not starved):
            return False
        self._note_excused(now, busy)
        return True

    def _is_explained(self, now: float, verdict: Verdict) -> bool:
        """Return whether a verdict would be a busy host's, or be taken back as such again.

        What a host explains by the last second it may not explain by the last few, and the other
        way round: what was taken back is told again only once the host has not explained it for
        that long.
        """
        key = (verdict.kind, str(verdict.culprit))
        if key in self._hosted and self._is_hosts(now, verdict, 0.5 * RECENT_S):
            self._hosted[key] = now
        if now - self._hosted.get(key, -math.inf) <= CLEAR_S:
            return True
        return self._is_hosts(now, verdict, CLEAR_S)

    def _note_excused(self, now: float, busy: set[int]) -> None:
        """Put what is slow on these nodes down to their hosts: it says nothing of the work."""
        self._excused.update(dict.fromkeys(busy, now))
        for node in busy:
            for rank in self._list_housed_ranks(node):
                for suspects in (self.stages.suspects, self.collectives.lateness.suspects):
                    if rank in suspects:
                        suspects[rank].explained = True

    def _estimate_lost(self, verdict: Verdict) -> float:
        """Return the share of its time that training loses by what a verdict says."""
        if verdict.kind == "CommSlow":
            return self._compute_loss([c for c in self.collectives.comms() if c.slow is not None])
        return 0.0 if verdict.slowness is None else verdict.slowness.share_low

    def _list_busy_nodes(
        self, now: float, nodes: set[int], since_s: float, lost: float = 0.0
    ) -> set[int]:
        return {node for node in nodes if self._hosts.explains(now, node, since_s, lost)}

    def _excuse(self, now: float, nodes: set[int]) -> None:
        """Put what waits for a CPU down to those of its machines that others' work fills."""
        self._note_excused(now, self._list_busy_nodes(now, nodes, now - CLEAR_S))

    def _judge_hosts(self, now: float) -> list[VerdictReached | VerdictWithdrawn]:
        """Say which hosts make the job slow by others' work, and take back what that explains.

        Where they are all busy, nobody is to blame.
        """
        confirmed = self._hosts.list_busy_nodes(now)
        explained = {
            key: old
            for key, old in self._open.items()
            if confirmed and old.kind != "HostBusy" and self._is_hosts(now, old, 0.5 * RECENT_S)
        }
        found = [n for n in confirmed if now - self._excused.get(n, -1e9) <= CLEAR_S]
        if not found:
            return []
        busy = {mate for node in confirmed for mate in self._hosts.list_nodes_beside(node)}
        every = len(self._housed) > 1 and busy >= set(self._housed)
        firsts = {min(self._hosts.list_nodes_beside(n)) for n in found}
        out: list[VerdictReached | VerdictWithdrawn] = []
        for node in [found[0]] if every else sorted(firsts)[: OPEN_MAX // 2]:
            verdict = self._blame_host(now, node, len(self._housed) if every else 0)
            reason = f"better explained: {verdict.reason}"
            for key, old in list(self._open.items()):
                other = old.kind == "HostBusy" and every != (old.culprit.node is None)
                if other or key in explained:
                    del self._open[key]
                    if key in explained:
                        self._hosted[key] = now
                    out.append(VerdictWithdrawn(verdict=old, at_s=now, reason=reason))
            out += self._report(now, verdict)
        return out

    def _blame_host(self, now: float, node: int, of_all: int) -> Verdict:
        """Return the verdict about the host of `node`, or about the hosts of all nodes."""
        words, evidence = self._hosts.describe(node)
        who, culprit = f"node {node} is", Culprit(node=node)
        if of_all:
            who, culprit = f"all {of_all} nodes are", Culprit()
            words = f"on node {node} {words}"
        reason = f"{who} busy with others' work: {words}"
        since_s = self._hosts.busy_since_s(node)
        return self._make(now, "HostBusy", culprit, 0.9, reason, since_s, evidence)

    # --- communication ------------------------------------------------------------------------

    def _find_comm_slow(self, now: float) -> Verdict | None:
        slow = [
            comm
            for comm in self.collectives.comms()
            if comm.slow is not None
            and comm.slow.is_recent(now, RECENT_S)
            and comm.slow.recent(now, RECENT_S) > 0.0
        ]
        if self._neighbours_explain(slow):
            lasting = [c for c in slow if c.slow is not None and c.slow.confirm(now, hurry=0.5) > 0]
            self._excuse(now, {self._node_of(rank) for c in lasting for rank in c.ranks})
            return None
        if self._is_hidden(slow):
            return None
        links = self.links.list_slow_links(now, fused=bool(slow))
        least = ACCOUNTED * self._compute_loss(slow)
        links = [link for link in links if not link.cost or link.cost >= least]
        links = [link for link in links if self._accounts_for(link, slow)]
        if links and self._matters(now, slow, {name for link in links for name in link.comms}):
            began_s = min(link.slow.began_s for link in links if link.slow is not None)
            sure = any(c.slow.confirm(now, hurry=0.5) > 0 for c in slow if c.slow is not None)
            if now - began_s >= (FUSED_S if sure else LINK_S):
                place = self.links.place(now, links, "slow")
                if place is not None:
                    onset_s = min(x.slow.onset_s() for x in links if x.slow is not None)
                    return self._blame_place(now, place, slow, onset_s)
        if slow and now - self.links.swept_s <= RECENT_S:
            # The links are asked first: a quiet sweep may be a second old.
            wait_s = UNPLACED_S if self.links.have_choice(now) else UNPLACED_S / 3
            slow = [c for c in slow if c.slow is not None and now - c.slow.onset_s() >= wait_s]
        confirmed = [(c.slow.confirm(now), c) for c in slow if c.slow is not None]
        confirmed = [(e, c) for e, c in confirmed if e > 0.0]
        return self._blame_comms(now, confirmed, slow) if confirmed else None

    def _accounts_for(self, link: Link, slow: list[Comm]) -> bool:
        """Return whether a link was busy for long enough to make its slow collectives as slow.

        While the link that holds a collective up has data to send, all of them wait, so that it
        is busier than usual for as long as the collective is longer. Another that is half as
        busy again by chance is not, however slow the collective. A step's collectives together
        are what one of them may have waited behind. Without cost it is loss that is seen; without
        steps it is not known over how long to count.
        """
        comms = [c for c in slow if c.name in link.comms]
        if not link.cost or not comms or not self.links.step_s:
            return True
        extra_s = min(c.worst_extra_s for c in comms)
        return link.extra_s >= ACCOUNTED * min(extra_s, self.links.kept_s)

    def _matters(self, now: float, slow: list[Comm], names: set[str]) -> bool:
        """Return whether links that look slow make training slow."""
        pace = self.stages.pace
        if slow:
            return True
        if not self._spans_seen:
            return not pace or pace >= 1.05
        return bool(names & self.collectives.point_to_point) and pace >= 1.1

    def _blame_place(self, now: float, place: Place, slow: list[Comm], began_s: float) -> Verdict:
        taken, _ = self._neighbours.sum_up({r for c in slow for r in c.ranks})
        evidence = place.evidence | {"run_delay_share": round(taken, 3)}
        reason = place.reason
        if slow:
            worst = max(slow, key=lambda c: c.slow.recent(now, RECENT_S) if c.slow else 0.0)
            excess = worst.slow.recent(now, RECENT_S) if worst.slow else 0.0
            evidence |= worst.worst | {"ratio": round(1.0 + excess, 2)}
            reason += f"; {worst.name} takes {1.0 + excess:.1f} times as long as usual"
            began_s = min(c.slow.onset_s() for c in slow if c.slow is not None)
        if place.probe:
            evidence["probe"] = list(place.probe)
        culprit = Culprit(link=place.link) if place.link else Culprit(node=place.node)
        return self._make(now, "CommSlow", culprit, place.confidence, reason, began_s, evidence)

    def _blame_comms(
        self, now: float, confirmed: list[tuple[float, Comm]], slow: list[Comm]
    ) -> Verdict | None:
        """No link stands out (or none is seen): what the slow communicators have in common."""
        excess, worst = max(confirmed, key=lambda pair: (pair[0], pair[1].name))
        began_s = min(c.slow.onset_s() for _, c in confirmed if c.slow is not None)
        healthy = [
            c
            for c in self.collectives.comms()
            if c not in slow and now - c.judged_s <= RECENT_S and c.baselines
        ]
        watched = now - self.links.swept_s <= RECENT_S
        if watched and self._host_explains(now, worst):
            return None  # A host that computes slowly also communicates slowly.
        homes = [{self._node_of(r) for r in c.ranks} for c in slow]
        nodes = set.intersection(*homes) if slow else set()
        left = sorted(nodes - {self._node_of(r) for c in healthy for r in c.ranks})
        ranks = set.intersection(*(set(c.ranks) for c in slow)) if slow else set()
        culprit, confidence = Culprit(), 0.5
        if len(left) == 1 and self._spec.nodes > 1:
            culprit, confidence = Culprit(node=left[0]), 0.6
        elif len(ranks) == 2:
            a, b = sorted(ranks)
            culprit = Culprit(link=(a, b))
        probe = (left or sorted(nodes))[:PROBED_MAX]
        reason = (
            f"{worst.name} takes {1.0 + excess:.1f} times as long as usual, measured by its last "
            f"rank to arrive; {'no link stands out' if watched else 'links are not watched'}"
        )
        evidence = worst.worst | {
            "ratio": round(1.0 + excess, 2),
            "probe": probe,
            "slow_communicators": [c.name for c in slow][:16],
        }
        return self._make(now, "CommSlow", culprit, confidence, reason, began_s, evidence)

    def _is_hidden(self, slow: list[Comm]) -> bool:
        """Return whether no rank waits longer than usual, by the steps that have ended.

        They know nothing yet of a collective that takes as long as a step.
        """
        exposed, step_s = self.stages.exposed, self.stages.step_s
        if exposed is None or exposed >= IMPACT:
            return False
        return all(c.worst_s < step_s / 2 for c in slow)

    def _neighbours_explain(self, slow: list[Comm]) -> bool:
        """Return whether training lost no more than its neighbours took of the CPU.

        Whoever waits for a CPU also answers the network late, and nothing is wrong with that.
        """
        taken, most = self._neighbours.sum_up({r for c in slow for r in c.ranks})
        least = ACCOUNTED * self._compute_loss(slow)
        return most >= (min(STARVED, least) or STARVED) and taken >= least

    def _compute_loss(self, slow: list[Comm]) -> float:
        """Return the share of the time that training loses against its usual pace."""
        if self.stages.exposed is not None:
            return self.stages.exposed
        pace = max([self.stages.pace, *(c.compute_pace() for c in slow)])
        return 1.0 - 1.0 / pace if pace > 1.0 else 0.0

    def _host_explains(self, now: float, comm: Comm) -> bool:
        suspects = self.stages.suspects
        return any(
            r in suspects and suspects[r].recent(RECENT_S) > STRAGGLER_EXCESS for r in comm.ranks
        )

    # --- stragglers ---------------------------------------------------------------------------

    def _blame_stragglers(self, now: float, watches: Mapping[int, RankWatch]) -> list[Verdict]:
        if not self.stages.seen:
            return self._find_late(now, watches)
        confirmed: dict[int, float] = {}
        for rank, suspect in sorted(self.stages.suspects.items()):
            excess = suspect.excess
            watch = watches.get(rank)
            if excess > 0.0 and watch is not None and not watch.gone:
                if self._is_neighbour(rank, excess) and now - suspect.began_s < NEIGHBOUR_S:
                    self._excuse(now, {self._node_of(rank)})
                    continue
                confirmed[rank] = excess
        if 2 * len(confirmed) > max(len(watches), 2):
            return []
        out: list[Verdict] = []
        done: set[int] = set()
        for rank, excess in sorted(confirmed.items(), key=lambda pair: (-pair[1], pair[0])):
            node = self._node_of(rank)
            if node in done or ("Straggler", f"node {node}") in self._open:
                continue
            out.append(self._blame_rank(now, rank, excess, watches[rank]))
            if out[-1].culprit.node is not None:
                done.add(node)
        return out

    def _blame_rank(self, now: float, rank: int, excess: float, watch: RankWatch) -> Verdict:
        suspect = self.stages.suspects[rank]
        share = self.stages.describe(rank)
        taken = self._neighbours.taken_from(rank)
        evidence: dict[str, object] = {
            "stage": share.stage,
            "ratio": round(1.0 + excess, 3),
            "extra_s_per_step": share.extra_s,
            "exposed_s_per_step": share.frontier_s,
            "step_s": round(share.step_s, 5),
            "pid": watch.newest.pid,
        }
        work = self.stages.describe_work(rank)
        evidence |= work
        if taken is not None:
            evidence["run_delay_share"] = round(taken, 3)
        confidence = 0.6 if self._is_neighbour(rank, excess) else round(suspect.probability, 2)
        node = self._node_of(rank)
        limit, throttled = self._hosts.describe_limit(node)
        evidence |= throttled
        mates = list(self._list_housed_ranks(node))
        culprit, who = Culprit(rank=rank), f"rank {rank}"
        if self._spec.nodes > 1 and len(mates) > 1 and self._all_slow(now, mates, excess):
            culprit, who = Culprit(node=node), f"node {node}: each of its {len(mates)} ranks"
        extra_s = sum(v for v in share.extra_s.values() if v > 0)
        part = "its own work" if share.stage == "compute" else share.stage
        reason = (
            f"{who} takes {1.0 + excess:.2f} times as long for its work; {part} is "
            f"{extra_s * 1e3:.0f} ms longer a step, and the others wait{_tell_work(work)}{limit}"
        )
        verdict = self._make(
            now, "Straggler", culprit, confidence, reason, suspect.began_s, evidence
        )
        return msgspec.structs.replace(verdict, step=watch.account.step, activity=watch.activity)

    def _all_slow(self, now: float, mates: list[int], excess: float) -> bool:
        """Return whether the whole node is about as slow as its slowest rank."""
        suspects = self.stages.suspects
        return all(
            r in suspects
            and suspects[r].recent(RECENT_S) >= max(0.7 * STRAGGLER_EXCESS, 0.5 * excess)
            for r in mates
        )

    def _is_neighbour(self, rank: int, excess: float) -> bool:
        """Return whether what the rank lost is what its neighbours took: it waited for a CPU.

        It is slow compared with the others, so only what was taken from it alone explains that.
        """
        return self._neighbours.take_more_from(rank) >= 0.5 * excess / (1.0 + excess)

    def _find_late(self, now: float, watches: Mapping[int, RankWatch]) -> list[Verdict]:
        """Without stages: of those that arrive late, the one that waits for nobody itself.

        While that lasts, nobody else is blamed: they may be late because of it.
        """
        lateness = self.collectives.lateness
        late = [
            rank
            for rank, suspect in sorted(lateness.suspects.items())
            if suspect.excess > 0.0 and rank in watches
        ]
        blamed = any(("Straggler", str(Culprit(rank=rank))) in self._open for rank in late)
        if not late or blamed or 2 * len(late) > max(len(watches), 2):
            return []
        rank = min(late, key=lateness.rate)
        suspect, waited_s = lateness.suspects[rank], lateness.waited.get(rank, 0.0)
        excess, began_s = suspect.excess, suspect.began_s
        evidence: dict[str, object] = {
            "stage": "compute",
            "ratio": round(1.0 + excess, 3),
            "waits_ms": round(waited_s * 1e3, 3),
            "late": late[:16],
            "probe": [self._node_of(rank)],
        }
        limit, throttled = self._hosts.describe_limit(self._node_of(rank))
        evidence |= throttled
        timed = self._rests_on_device_times("Straggler")
        how = "by its device's clock" if timed else "its stages are not recorded: compute"
        reason = (
            f"rank {rank} takes {1.0 + excess:.2f} times as long from one collective to the next, "
            f"and waits for nobody itself ({how}){limit}"
        )
        sure = round(suspect.probability, 2)
        verdict = self._make(now, "Straggler", Culprit(rank=rank), sure, reason, began_s, evidence)
        return [msgspec.structs.replace(verdict, step=watches[rank].account.step)]

    # --- suspicion ----------------------------------------------------------------------------

    def _list_suspect_nodes(self, now: float) -> frozenset[int]:
        slow = self.links.list_slow_links(now, fused=False)
        nodes = {self._node_of(rank) for link in slow for rank in link.ends}
        for comm in self.collectives.comms():
            if comm.slow is not None and comm.slow.is_recent(now, RECENT_S) and len(nodes) < 64:
                nodes.update(self._node_of(r) for r in comm.ranks[:512])
        ranks = [*self.stages.suspects, *self.collectives.lateness.suspects]
        return frozenset(nodes | {self._node_of(rank) for rank in ranks})


def _tell_work(work: Mapping[str, object]) -> str:
    """Return what declared work has to do with it, as the end of a sentence."""
    if not work:
        return ""
    declared = f"it declares {work['declared_work']:.2f} times the others' work"
    return f"; {declared}" + ("" if work["work_believed"] else ", which its times do not bear out")


def _make_slowness(
    excess: tuple[float, float, float], share: float, share_low: float | None = None
) -> Slowness:
    """Return the slowness of an excess (low, median, high) that costs `share` of the step.

    Where its lower end is not known, it is taken to be as far below as that of the excess.
    """
    low, mid, high = excess
    if share_low is None:
        share_low = min(share * max(low, 0.0) / mid if mid > 0.0 else 0.0, share)
    return make_slowness((1.0 + low, 1.0 + mid, 1.0 + high), share, share_low)
