"""A keeper that does not answer: named at once, ended when something is needed of it.

A stopped keeper (state T: a debugger, a slip of `kill`) harms nothing at first, since the ranks
train on without it. But their ends are seen by nobody, and no order is carried out. Ending it
ends its ranks, so that is the dearer rung, and it is not taken before there is a reason: an order
that waits, a rank that has ended unseen, or `quiet_action_s` of silence where the job file sets
one. Until then the agent asks for a checkpoint, so that little is lost by it. To continue it
(SIGCONT) is not ours: whoever stopped it may be looking at it. A job that is only observed is
asked for nothing, and of the reasons an order that waits and an end count alone.
"""

from perdure.agent.messages import EndKeeper, KeeperSilent, Report, Request
from perdure.agent.state import AgentState, KeeperView, NodeIdentity, Silence
from perdure.model.events import NodeAsked, VerdictReached, VerdictWithdrawn
from perdure.model.job import JobSpec
from perdure.model.verdicts import Culprit, Verdict


def note_silence(
    state: AgentState, identity: NodeIdentity, spec: JobSpec, now: float, silent: KeeperSilent
) -> list[Request]:
    """Return what to do about a keeper that has not answered for a while."""
    requests: list[Request] = []
    view, silence = state.keeper, state.silence
    if silence is None:
        silence = state.silence = Silence(_make_verdict(identity, now, silent))
        requests.append(Report(VerdictReached(verdict=silence.verdict)))
        if view is not None and view.running and spec.unordered.saves:
            id_ = f"silent-keeper-{identity.node}-{silent.pid}-g{view.generation}"
            who = f"silence of the keeper of node {identity.node}"
            asked = NodeAsked(id=id_, node=identity.node, kind="checkpoint", who=who, at_s=now)
            requests.append(Report(asked))
    reason = _find_reason(view, spec, silent)
    if silence.ended or not reason:
        return requests
    silence.ended = True
    state.lost_cause = f"{_describe(silent)}; it was ended because {reason}"
    return [*requests, EndKeeper(state.lost_cause)]


def note_voice(state: AgentState, now: float) -> list[Request]:
    """Return what to do about a keeper that answers again."""
    silence, state.silence = state.silence, None
    if silence is None:
        return []
    reason = "the keeper answers again"
    return [Report(VerdictWithdrawn(verdict=silence.verdict, at_s=now, reason=reason))]


def _find_reason(view: KeeperView | None, spec: JobSpec, silent: KeeperSilent) -> str:
    if view is None:
        return "nobody knows what it holds" if spec.unordered.ends_unknown else ""
    waiting = (
        view.kill_asked > view.stopped
        or view.spawn_asked > view.generation
        or view.store_asked > view.store_generation
    )
    if waiting:
        return "an order waits for it"
    if silent.ended:
        return f"ranks {list(silent.ended)} have ended and nobody took note"
    patience_s = spec.unordered.quiet_action_s
    if patience_s is not None and silent.silent_s >= patience_s:
        return f"it has not answered for {silent.silent_s:.0f} s"
    return ""


def _make_verdict(identity: NodeIdentity, now: float, silent: KeeperSilent) -> Verdict:
    """Of no generation: it is about a part of perdure, and no rank is to be acted upon by it."""
    return Verdict(
        kind="Unresponsive",
        culprit=Culprit(node=identity.node),
        generation=-1,
        first_seen_s=now - silent.silent_s,
        confirmed_s=now,
        confidence=1.0,
        reason=f"the keeper of node {identity.node} (pid {silent.pid}) {_describe(silent)}; "
        "its ranks train on",
        activity="stopped" if silent.state in "Tt" else "quiet",
        evidence={"pid": silent.pid, "proc_state": silent.state},
        certain=silent.state == "T",
    )


def _describe(silent: KeeperSilent) -> str:
    how = "is stopped (state T)" if silent.state == "T" else f"is in state {silent.state}"
    return f"{how} and does not answer"
