"""Heartbeats to verdicts: who makes no progress, since when, and whether to act yet.

A hang is found by the absence of progress, measured against the job's own steps, and is blamed
on the rank that did not arrive (`arrival`). Saying so and acting on it are two thresholds: a
verdict comes within about a second, and becomes actionable only on a fact, once patience has run
out, or as the job file says (`certainty`). Slowness is another matter (`slow`), judged while
nothing stands still. Crashes are not looked at here: an exit needs no detector.
"""

import math
from collections.abc import Sequence

import msgspec

from perdure.detect.arrival import Finding, find_culprit
from perdure.detect.cadence import Cadence, Habits
from perdure.detect.certainty import (
    AGAIN,
    SURE,
    Grounds,
    decide_grounds,
    measure_stillness,
    settle_verdict,
)
from perdure.detect.desync import DesyncWatch
from perdure.detect.nodes import NodeClocks, NodeWatch
from perdure.detect.progress import ProgressNotes
from perdure.detect.slowness.slow import SlowWatch
from perdure.detect.watch import RankWatch
from perdure.model.events import (
    AnyEvent,
    ControllerStarted,
    GenerationStepping,
    MachineReported,
    NodeLost,
    NodeRegistered,
    ProbeJudged,
    ProgressNoted,
    RankExited,
    RanksStarted,
    StacksTaken,
    VerdictReached,
    VerdictWithdrawn,
    WorldBroken,
    WorldReformed,
)
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.signals.progress import CommProgress, JobHabits, NodeBeat, RankProgress
from perdure.model.signals.stacks import ThreadStack, parse_threads
from perdure.model.verdicts import (
    EXIT_SKEW_S,
    HANGS,
    INSIDE,
    Activity,
    Culprit,
    Ground,
    Verdict,
)

SLOW = ("CommSlow", "Straggler", "HostBusy")
LOOK_S = 5.0
"""A second look at a suspect's stack is waited for no longer than this."""
PLACE_MAX = 200
"""Characters of a place: a communicator's name is what a rank says it is."""
ACTED_KEPT = 8
"""Verdicts that have restarted the world, and are remembered."""
EARLY = 0.5
"""Share of the floor after which silence deserves a closer look."""
CLOSE_MAX = 64
"""Nodes that are looked at closely at once."""
FRESH_S = 2.0
"""Nothing is acted upon by a heartbeat older than this: its agent may be restarting."""


class Unwatched:
    """In the place of a detector, where another part of perdure does the watching.

    Replica groups of a torchft job have no collective and no step in common outside a quorum; who
    is silent or late there, perdure's lighthouse finds (`perdure.control.lighthouse.quorum`). Where
    that is torchft's own, `perdure.control.lighthouse.watch` does.
    """

    def reconfigure(self, config: DetectConfig) -> None:
        """Take other thresholds."""

    def take_beat(self, now: float, beat: NodeBeat) -> list[AnyEvent]:
        """Take a heartbeat."""
        return []

    def note(self, now: float, event: AnyEvent) -> list[AnyEvent]:
        """Take an event of the journal."""
        return []

    def tick(self, now: float) -> list[AnyEvent]:
        """Do what is due."""
        return []

    def next_deadline(self) -> float | None:
        """Return when `tick` is wanted: never."""
        return None

    def suspects(self) -> set[int]:
        """Return the nodes under suspicion."""
        return set()

    def sum_up(self, now: float) -> ProgressNoted | None:
        """Return how far all ranks are: what groups have done, their own events tell."""
        return None


class Detector:
    """Watches one job, one generation of it at a time."""

    def __init__(self, spec: JobSpec) -> None:
        """Begin before the first event of the journal."""
        self._spec = spec
        self._nodes = NodeWatch(
            spec.detect.node_lost_s,
            spec.restart.node_wait_s,
            spec.detect.node_doubt_s,
            local_nodes=spec.local_nodes if spec.remote else math.inf,
        )
        self._notes = ProgressNotes(spec)
        self._habits = Habits()
        self._cadences: dict[int, Cadence] = {}
        self._looked_s = self._weighed_s = 0.0
        self._look_every_s = max(0.05, spec.world_size / 10_000)
        self._weigh_every_s = max(0.19, spec.world_size / 10_000)
        self._clocks = NodeClocks()
        self._acted: dict[str, int] = {}
        """Kind, culprit and place of each verdict that was acted upon -> in which generation."""
        self._stack_s = 0.0
        """When stacks came last."""
        self._begin(-1, 0.0)

    def reconfigure(self, config: DetectConfig) -> None:
        """Judge by `config` from now on; what is open by now stays open."""
        self._spec = msgspec.structs.replace(self._spec, detect=config)
        self._nodes.reconfigure(config)
        for watch in self._watches.values():
            watch.config = config
        self._slow.reconfigure(config)

    # --- what comes in ------------------------------------------------------------------------

    def take_beat(self, now: float, beat: NodeBeat) -> list[AnyEvent]:
        """Take a heartbeat; return what it shows."""
        if not self._nodes.take_beat(now, beat):
            return []
        beat, clock_s = self._clocks.translate(now, beat)
        if beat.generation > self._generation:
            self._begin(beat.generation, now)
        if beat.generation < self._generation or beat.generation < 0:
            return []
        due, suspicious = now - self._looked_s >= self._look_every_s, False
        for progress in beat.ranks:
            watch = self._take(now, beat, progress, clock_s)
            if due and not suspicious and watch is not None:
                suspicious = watch.is_silent(self._habits)
        out: list[AnyEvent] = [*self._notes.make(now, self._watches, self._note_habits)]
        self._slow.take(now, beat)
        if now - self._weighed_s >= self._weigh_every_s:
            out += [*self._weigh(now), *self._act_on_quits()]
        if due and (suspicious or self._open):
            out += self._look(now)
        return out

    def note(self, now: float, event: AnyEvent) -> list[AnyEvent]:
        """Take a journaled event, in replay as well; return what follows from it."""
        match event:
            case ControllerStarted():
                self._nodes.restart(now)
            case NodeRegistered():
                self._nodes.register(now, event.node)
            case NodeLost():
                self._nodes.mark_lost(event.node)
            case RanksStarted() if event.generation > self._generation:
                self._begin(event.generation, now)
            case RankExited() if event.record.generation == self._generation:
                return self._note_exit(now, event)
            case ProgressNoted() if event.generation == self._generation:
                self._notes.mark_noted(event)
                self._learn(event)
            case GenerationStepping() if event.generation == self._generation:
                self._notes.mark_stepping()
            case VerdictReached() | VerdictWithdrawn():
                self._note_verdict(event)
            case MachineReported() if event.ended_s:
                self._nodes.note_end(now, event.node, event.reason)
            case WorldBroken() if event.generation == self._generation:
                self._note_broken(now, event)
            case WorldReformed() if event.generation == self._generation:
                self._nodes.trust()
                return self._go_on(now, event)
            case StacksTaken() if event.generation == self._generation:
                self._note_stacks(now, event)
            case ProbeJudged():
                return self._note_probe(now, event)
        return []

    def tick(self, now: float) -> list[AnyEvent]:
        """Return what time alone has brought about: nodes fallen silent.

        Everything else is said of a rank that is still heard of, so a heartbeat brings it.
        """
        lost = self._nodes.detect_lost(now, self._read_peers_alive_s)
        return [*self._note_last(now), *lost] if lost else []

    def next_deadline(self) -> float | None:
        """Return when to call `tick`."""
        return self._nodes.due_s

    def suspects(self) -> frozenset[int]:
        """Return the nodes that deserve a closer look (`WatchClosely`), verdict or not."""
        return self._early | self._slow.suspects

    def _read_peers_alive_s(self, node: int) -> tuple[float, float]:
        """Return when peers of `node`'s ranks last began a collective of a group they share.

        Nobody gets as far without them: what a peer began, its group had finished the one before.
        The second value is how long their steps usually take: the next sign of them may be as far.
        """
        silent = [w for w in self._watches.values() if w.node == node and not w.gone]
        shared = {comm.name: watch.rank for watch in silent for comm in watch.comms}
        since_s = 0.0
        for watch in self._watches.values():
            for comm in watch.comms if watch.node != node else ():
                with_it = not comm.ranks or shared.get(comm.name) in comm.ranks
                if comm.name in shared and with_it and comm.started_seq > 1:
                    since_s = max(since_s, comm.since_s + watch.clock_s)
        return since_s, max((w.cadence.usual_s for w in silent), default=0.0)

    # --- bookkeeping --------------------------------------------------------------------------

    def _begin(self, generation: int, now: float) -> None:
        self._generation = generation
        self._watches: dict[int, RankWatch] = {}
        self._exited: dict[int, tuple[CommProgress, ...]] = {}
        self._exit_s: dict[int, float] = {}
        self._open: Verdict | None = None
        self._closed = self._failed = False
        self._explained = False
        """A rank of this generation has failed of itself, so that others' connections ended."""
        self._epoch, self._left = 0, False
        """The newest that was formed or has broken, and whether a rank has ended in it."""
        before = self._slow if generation > 0 else None
        self._slow: SlowWatch = SlowWatch(self._spec, generation, before)
        self._desync = DesyncWatch()
        self._waiting: tuple[int, ...] = ()
        """Ranks whose progress ends the open verdict, where it names none."""
        self._early: frozenset[int] = frozenset()
        self._finished: set[int] = set()
        """Members of an elastic world that have applied its last step."""
        self._quits: dict[int, Verdict] = {}
        """What is said of those that ended before, and is not acted upon yet."""
        self._stacks: dict[int, tuple[ThreadStack, ...]] = {}
        self._stack_changed_s = 0.0
        """When one of the stacks had changed."""
        self._second_s: float | None = None
        """When a second look at the stacks was asked for, before the open verdict is acted upon."""
        self._nodes.trust()
        self._notes.begin(generation, now)

    def _take(
        self, now: float, beat: NodeBeat, progress: RankProgress, clock_s: float
    ) -> RankWatch | None:
        watch = self._watches.get(progress.rank)
        moved = True
        if watch is None:
            if progress.rank in self._exit_s:
                return None
            cadence = self._cadences.setdefault(progress.rank, Cadence())
            watch = RankWatch(progress.rank, beat.node, cadence, self._spec.detect, progress)
            self._watches[progress.rank] = watch
            watch.clock_s = clock_s
            watch.begin(progress, beat.sent_s)
        elif watch.gone:
            return None
        else:
            watch.clock_s = clock_s
            moved = watch.follow(progress, beat.sent_s, self._habits)
        watch.hear(now, beat.sent_s, moved=moved)
        self._desync.take(watch, progress.spans)
        self._notes.take(watch, moved)
        return watch

    def _enter_epoch(self, epoch: int) -> None:
        """Whose end explains why connections ended, explains that of its own epoch only."""
        if epoch > self._epoch:
            self._epoch, self._left = epoch, False

    def _note_broken(self, now: float, event: WorldBroken) -> None:
        self._enter_epoch(event.epoch)
        if event.lost_peer and event.epoch == self._epoch and not self._left:
            self._nodes.doubt(now)

    def _note_exit(self, now: float, event: RankExited) -> list[AnyEvent]:
        record = event.record
        watch = self._watches.get(record.rank)
        self._exit_s[record.rank] = record.at_s
        if not record.lost_peer:
            self._left = True
            self._nodes.trust()
        if watch is not None:
            watch.gone = True
            if event.account.last_step_s >= watch.account.last_step_s:
                watch.account = event.account
        if record.failed:
            if not record.asked:
                explained = self._explained or not record.lost_peer
                self._explained = explained
                self._nodes.note_exit(now, lost_peer=not explained)
            self._failed = self._closed = True
            return self._note_last(now)
        elif not record.asked:
            if event.account.finished_s:
                self._finished.add(record.rank)
            self._exited[record.rank] = event.comms or (watch.comms if watch else ())
            self._notes.mark_ended(record.rank, record.at_s)
            return self._acquit(now, record.rank)
        return []

    def _acquit(self, now: float, rank: int) -> list[AnyEvent]:
        """A rank that came to its end did not hang, though no heartbeat has shown it go on."""
        verdict = self._open
        if verdict is None or verdict.kind not in HANGS:
            return []
        if verdict.culprit.rank is not None and verdict.culprit.rank != rank:
            return []
        self._reopen()
        reason = f"rank {rank} went on and ended with exit code 0"
        return [VerdictWithdrawn(verdict=verdict, at_s=now, reason=reason)]

    def _go_on(self, now: float, event: WorldReformed) -> list[AnyEvent]:
        """The world goes on in place, without those who ended: watch who is left."""
        self._enter_epoch(event.epoch)
        self._notes.mark_formed(event.rank, event.epoch)
        if event.finished:
            self._finished.add(event.rank)
            self._quits.pop(event.rank, None)
            return []
        out = [r for r in self._exited if r not in self._finished and self._notes.has_left(r)]
        for rank in out:
            del self._exited[rank]  # Nobody waits for it any more.
        for rank in [r for r, w in self._watches.items() if w.gone and r not in self._exited]:
            del self._watches[rank]
            self._notes.mark_ended(rank, self._exit_s.get(rank, event.formed_s))
        over, self._closed, self._open = self._open, False, None
        quits = [VerdictReached(verdict=self._describe_quit(now, rank, event)) for rank in out]
        if over is None or over.kind not in HANGS or over.actionable:
            return [*quits]
        reason = f"the world was formed again, in epoch {event.epoch}"
        return [VerdictWithdrawn(verdict=over, at_s=now, reason=reason), *quits]

    def _describe_quit(self, now: float, rank: int, event: WorldReformed) -> Verdict:
        """Return what is to be said of a member that others have formed epoch `event` without."""
        return Verdict(
            kind="EarlyExit",
            culprit=Culprit(rank=rank),
            generation=self._generation,
            first_seen_s=self._exit_s[rank],
            confirmed_s=now,
            confidence=0.9,
            reason=f"rank {rank} ended with exit code 0 before the last step; "
            f"the others go on without it in epoch {event.epoch}",
            step=event.step,
            evidence={"epoch": event.epoch},
            certain=True,
            ground="ended",
            acts_s=max(now, self._exit_s[rank] + EXIT_SKEW_S),
            acts_why=f"rank {rank} has ended, and the others train on",
        )

    def _act_on_quits(self) -> list[AnyEvent]:
        """Let a member that ended early be replaced, once the others have trained on meanwhile.

        Where all leave the loop at one step, as a script may, nobody commits another step.
        """
        stepped = [w.account.last_step_s for w in self._watches.values() if not w.gone]
        newest_s = max(stepped, default=0.0)
        return [
            VerdictReached(verdict=msgspec.structs.replace(verdict, actionable=True))
            for verdict in self._quits.values()
            if newest_s > verdict.acts_s
        ]

    def _learn(self, event: ProgressNoted) -> None:
        """After a controller's restart the journal is all that is known of what is usual."""
        self._habits.learn(event.habits)
        for place in event.habits.acted:
            self._acted.setdefault(place, event.generation - 1)
        for rank, account in event.accounts.items():
            cadence = self._cadences.setdefault(rank, Cadence())
            steps = account.step - account.start_step
            if len(cadence) < 3 and rank not in self._watches and steps > 0:
                cadence.add(account.step_s / steps)

    def sum_up(self, now: float) -> ProgressNoted | None:
        """Return how far all ranks are, for who looks at the job now."""
        return self._notes.sum_up(now, self._watches, self._note_habits())

    def _note_last(self, now: float) -> list[AnyEvent]:
        return [*self._notes.make_last(now, self._watches, self._note_habits)]

    def _note_habits(self) -> JobHabits:
        earlier = tuple(p for p, since in self._acted.items() if since < self._generation)
        return msgspec.structs.replace(self._habits.note(), acted=earlier)

    def _note_stacks(self, now: float, event: StacksTaken) -> None:
        """Compare stacks with those that were taken before: what has changed is alive."""
        self._stack_s = now
        for rank, text in event.stacks.items():
            stack = parse_threads(text)
            known = self._stacks.get(rank, ())
            if stack and known and _list_working_frames(stack) != _list_working_frames(known):
                self._stack_changed_s = now
            if stack:
                self._stacks[rank] = stack

    def _note_verdict(self, event: VerdictReached | VerdictWithdrawn) -> None:
        verdict = event.verdict
        if verdict.generation != self._generation:
            return
        rank = verdict.culprit.rank
        if verdict.kind in SLOW:
            self._slow.note(event)
        elif verdict.kind == "EarlyExit" and rank is not None and self._notes.has_left(rank):
            self._quits[rank] = verdict  # Nothing stands still: the others have gone on.
            if verdict.actionable:
                del self._quits[rank]
        elif isinstance(event, VerdictReached):
            self._open = verdict
            self._closed |= verdict.actionable
            if verdict.actionable:
                self._acted.pop(place := self._name_verdict_place(verdict), None)
                self._acted[place] = verdict.generation
                while len(self._acted) > ACTED_KEPT:
                    del self._acted[next(iter(self._acted))]
        else:
            self._reopen()

    def _reopen(self) -> None:
        """What was blamed goes on, and nobody has ended it: the next fault is looked for."""
        self._open = self._second_s = None
        self._closed = self._failed

    # --- verdicts -----------------------------------------------------------------------------

    def _look(self, now: float) -> list[AnyEvent]:
        """Look at the whole generation: withdraw, find, escalate."""
        self._looked_s = now
        out: list[AnyEvent] = []
        if self._open is not None and (withdrawn := self._withdraw(now, self._open)):
            out.append(withdrawn)
            self._reopen()
        if self._closed:
            return out
        live = {r: w for r, w in sorted(self._watches.items()) if not w.gone}
        silent = {r: w for r, w in live.items() if w.is_silent(self._habits)}
        finding = find_culprit(
            now, live, silent, self._spec.world_size, self._exited, self._slow.links
        )
        if silent and finding is not None and finding.evidence:
            finding = self._desync.find_disagreement(now, live, thorough=True) or finding
        if finding is not None:
            out += self._report(now, finding)
        return [*out, *self._perhaps_act(now)]

    def _perhaps_act(self, now: float) -> list[AnyEvent]:
        """Let the open verdict be acted upon, where something allows it by now.

        Patience that has run out is looked at once more: the suspect's stack must still be what
        it was, where it can be read. A dead link must have been tried again in vain.
        """
        verdict = self._open
        if verdict is None or verdict.actionable or self._closed:
            return []
        suspects = self._list_suspects(verdict)
        fresh = suspects and now - min(w.received_s for w in suspects) <= FRESH_S
        grounds = self._decide_grounds(now, verdict) if fresh else None
        if grounds is None or now < grounds.acts_s:
            self._second_s = None
            return []
        if grounds.ground == "link":
            dead_s = verdict.first_seen_s + grounds.acts_s - verdict.confirmed_s
            if not self._slow.links.is_in_vain(now, dead_s):
                return []
        verdict = _put(verdict, grounds)
        if grounds.ground in ("timeout", "habit"):
            if self._second_s is None:
                self._second_s, self._open = now, verdict
                return [VerdictReached(verdict=verdict)]
            if self._stack_s < self._second_s and now - self._second_s < LOOK_S:
                return []
        self._open = msgspec.structs.replace(
            verdict,
            actionable=True,
            activity=self._choose_activity(verdict),
            evidence={**verdict.evidence, "acted_after_s": round(now - verdict.confirmed_s, 3)},
        )
        self._closed = True
        return [VerdictReached(verdict=self._open)]

    def _weigh(self, now: float) -> list[AnyEvent]:
        """Look at what is slow, unless something stands still; and at what deserves a look."""
        self._weighed_s = now
        floor_s = EARLY * self._spec.detect.hang_floor_s
        quiet = (
            watch
            for watch in self._watches.values()
            if not watch.gone and watch.instrumented and watch.silence_s > floor_s
        )
        early = dict.fromkeys(w.node for w in quiet if w.silence_s > floor_s + w.cadence.usual_s)
        self._early = frozenset(list(early)[:CLOSE_MAX])
        out: list[AnyEvent] = []
        if self._open is None and not self._closed:
            out += self._slow.look(now, self._watches)
            finding = self._desync.find_disagreement(now, self._watches, thorough=False)
            if finding is not None:
                out += self._report(now, finding)
        else:
            self._slow.skip()
        return out

    def _note_probe(self, now: float, event: ProbeJudged) -> list[AnyEvent]:
        """Take what an active probe has found; where it settles an open verdict, say so."""
        nodes = {rank: watch.node for rank, watch in self._watches.items()}
        out: list[VerdictReached | VerdictWithdrawn] = []
        verdicts = [v for v in (self._open, *self._slow.open_verdicts()) if v is not None]
        for verdict in verdicts:
            better = settle_verdict(verdict, event.finding, nodes)
            if better is None:
                continue
            known = better.kind == verdict.kind
            if not (known and better.culprit == verdict.culprit):
                reason = f"better explained: {better.reason}"
                out.append(VerdictWithdrawn(verdict=verdict, at_s=now, reason=reason))
            if not (known and self._is_nearby(verdict.culprit, better.culprit)):
                better = msgspec.structs.replace(better, confirmed_s=now)
            if verdict is self._open and (grounds := self._decide_grounds(now, better)):
                better = _put(better, grounds)
            out.append(VerdictReached(verdict=better))
        for derived in out:
            self._note_verdict(derived)
        return [*out]

    def _report(self, now: float, finding: Finding) -> list[AnyEvent]:
        culprit = Culprit(rank=finding.rank, node=finding.node, link=finding.link)
        old, since_s = self._open, now
        out: list[AnyEvent] = []
        if old is not None:
            same = old.kind == finding.kind and old.culprit == culprit
            if same or old.confidence >= finding.confidence or old.kind == "Desync":
                return []
            reason = f"better explained: {finding.reason}"
            out.append(VerdictWithdrawn(verdict=old, at_s=now, reason=reason))
            still = all(w.progress_s <= old.confirmed_s for w in self._watches.values())
            if (
                old.kind == finding.kind == "CommHang"
                and still
                and self._is_nearby(old.culprit, culprit)
            ):
                since_s = old.confirmed_s
        self._waiting, self._second_s, self._stacks = finding.waiting, None, {}
        self._open = self._make_verdict(now, finding, culprit, since_s)
        return [*out, VerdictReached(verdict=self._open)]

    def _is_nearby(self, one: Culprit, other: Culprit) -> bool:
        """Return whether two places have a node in common, so that one fault is seen at both."""
        found = []
        for culprit in (one, other):
            ranks = culprit.link or (() if culprit.rank is None else (culprit.rank,))
            nodes = {watch.node for rank in ranks if (watch := self._watches.get(rank))}
            found.append(nodes if culprit.node is None else {culprit.node})
        return not found[0].isdisjoint(found[1])

    def _make_verdict(
        self, now: float, finding: Finding, culprit: Culprit, since_s: float
    ) -> Verdict:
        """Return the verdict that `finding` makes; since when it is known decides when to act."""
        watch = self._watches.get(finding.rank) if finding.rank is not None else None
        evidence = dict(finding.evidence)
        first_s = max(w.progress_s for w in self._watches.values() if not w.gone)
        step = max((w.account.step for w in self._watches.values()), default=-1)
        if finding.kind == "EarlyExit" and finding.rank is not None:
            first_s = self._exit_s[finding.rank]
        if watch is not None:
            step = watch.account.step
            if not watch.gone:
                allowed_s, why = watch.compute_allowance(self._habits)
                first_s = watch.progress_s
                evidence |= {
                    "pid": watch.newest.pid,
                    "proc_state": watch.newest.proc.state,
                    "phase": watch.newest.phase,
                    "silence_s": round(watch.silence_s, 3),
                    "allowed_s": round(allowed_s, 3),
                    "allowed_for": why,
                    "learned_step_s": round(watch.cadence.usual_s, 4),
                }
        verdict = Verdict(
            kind=finding.kind,
            culprit=culprit,
            generation=self._generation,
            first_seen_s=first_s,
            confirmed_s=since_s,
            confidence=finding.confidence,
            reason=f"{finding.reason}; no progress for {now - first_s:.1f} s",
            step=step,
            evidence=evidence,
        )
        verdict = msgspec.structs.replace(verdict, activity=self._choose_activity(verdict))
        grounds = self._decide_grounds(now, verdict)
        if grounds is None:
            return verdict
        if not grounds.certain and self._came_back(verdict):
            reason = f"{verdict.reason}; {AGAIN}"
            verdict = msgspec.structs.replace(verdict, reason=reason)
        return _put(verdict, grounds)

    def _withdraw(self, now: float, verdict: Verdict) -> VerdictWithdrawn | None:
        rank = verdict.culprit.rank
        if verdict.kind == "Desync":
            return None  # Going on does not mend it.
        if rank is not None and verdict.kind != "EarlyExit":
            watch = self._watches.get(rank)
            if watch is None or watch.stopped or watch.progress_s <= verdict.first_seen_s + 1e-6:
                return None
            who, at_s = f"rank {rank}", watch.progress_s
        else:
            waiting = self._waiting or tuple(self._watches)
            suspects = [self._watches[r] for r in waiting if r in self._watches]
            moved = [w for w in suspects if w.progress_s > verdict.confirmed_s]
            if not moved:
                return None
            who, at_s = f"rank {moved[0].rank}", moved[0].progress_s
        reason = f"{who} made progress again after {at_s - verdict.first_seen_s:.1f} s"
        return VerdictWithdrawn(verdict=verdict, at_s=now, reason=reason)

    def _list_suspects(self, verdict: Verdict) -> list[RankWatch]:
        """Return the ranks whose activity decides when to act on `verdict`."""
        rank = verdict.culprit.rank
        one = rank is not None and verdict.kind != "EarlyExit"
        return [w for r, w in self._watches.items() if not w.gone and (r == rank or not one)]

    def _choose_activity(self, verdict: Verdict) -> Activity:
        """Return what the suspects do; the busiest speaks for all."""
        seen = {w.activity for w in self._list_suspects(verdict)}
        order: tuple[Activity, ...] = ("busy", "blocked", "quiet", "stopped")
        return next((a for a in order if a in seen), "gone")

    def _decide_grounds(self, now: float, verdict: Verdict) -> Grounds | None:
        """Return on what `verdict` is to be acted upon, and when, as things look; None if never."""
        suspects = self._list_suspects(verdict)
        if not suspects:
            return None
        communicator = str(verdict.evidence.get("communicator", ""))
        endless = self._epoch > 0
        return decide_grounds(
            verdict,
            suspects,
            self._choose_activity(verdict),
            measure_stillness(suspects, communicator, self._stack_changed_s, endless=endless),
            self._spec.detect,
            self._habits,
            fact=self._find_fact(now, verdict),
            again=self._came_back(verdict),
        )

    def _find_fact(self, now: float, verdict: Verdict) -> Ground:
        """Return what records, or the kernel, prove about `verdict` as things look now."""
        if verdict.kind == "EarlyExit" and verdict.evidence.get(INSIDE):
            return "ended"
        if verdict.kind != "CommHang":
            return ""
        circle = verdict.evidence.get("circle", ())
        if circle and all(is_stuck(self._stacks.get(rank, ())) for rank in circle):
            return "circle"
        if verdict.confidence < SURE:
            return ""
        if "probed" in verdict.evidence:
            return "link"
        placed = verdict.culprit.link is not None or verdict.culprit.node is not None
        return "link" if placed and self._slow.links.list_stuck_links(now) else ""

    def _came_back(self, verdict: Verdict) -> bool:
        """Return whether it has restarted the world at this place before."""
        return (
            self._acted.get(self._name_verdict_place(verdict), verdict.generation)
            < verdict.generation
        )

    @staticmethod
    def _name_verdict_place(verdict: Verdict) -> str:
        """Return what makes it the same verdict in another generation."""
        place = f"step {verdict.step}"
        if verdict.step < 0:
            seen = verdict.evidence
            place = f"#{seen.get('collective', '?')} of {seen.get('communicator', '?')}"
        return f"{verdict.kind} of {verdict.culprit} at {place}"[:PLACE_MAX]


def is_stuck(threads: Sequence[ThreadStack]) -> bool:
    """Return whether a rank's main thread is blocked in torch.distributed, and nothing else works.

    Another thread, such as one that writes a checkpoint, may yet enter what others wait for.
    """
    main = [t for t in threads if t.is_main]
    return any(t.is_blocked for t in main) and not any(
        t.is_at_work for t in threads if not t.is_main
    )


def _list_working_frames(threads: Sequence[ThreadStack]) -> list[tuple[str, ...]]:
    """Return where the main thread is, and all that work: a background thread may tick for ever."""
    return [t.frames for t in threads if t.is_main or t.is_at_work]


def _put(verdict: Verdict, grounds: Grounds) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        certain=grounds.certain,
        ground=grounds.ground,
        acts_s=grounds.acts_s,
        acts_why=grounds.why,
    )
