"""`perdure pause` and `perdure resume`: all ranks stand before one step, for as long as wanted.

A pause is agreed upon like everything else (`boundary` asks, commits and aborts) and then belongs
to the job: a world that begins meanwhile is told of it (`Steering`), makes again what was lost, and
stands at the same step. Other agreements go on in a pause, at its step: the ranks that stand there
carry them out.
"""

from perdure.control.job import JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.control.membership.quorum import hold_groups
from perdure.control.promises import OpenBoundary, Pause, Resume
from perdure.model.events import BoundaryReached, JobPaused, JobResumed
from perdure.model.orders import AnyAction, RecordEvent, ResumeRanks
from perdure.model.steering import RESUMED


def commit_pause(state: JobState, now: float, boundary: OpenBoundary) -> list[AnyAction]:
    """Commit a pause that all ranks have promised: every world stands at its step from now on."""
    command = state.commands.get(boundary.command)
    pause = Pause(
        id=boundary.name,
        step=boundary.step,
        who=command.who if command else "",
        why=str(command.args.get("why", "")) if command else "",
        command=boundary.command,
    )
    state.world.checkpoint_due_s = None
    return [_begin_pause(state, now, pause)]


def reach_pause(state: JobState, event: BoundaryReached) -> list[AnyAction]:
    """Take one rank's report that it stands; answer once all do."""
    pause = state.steering.pause
    if pause is None or event.id != pause.id:
        return []
    if event.error:
        state.steering.pause = None
        return state.answer_all("pause", False, f"rank {event.rank}: {event.error}", {})
    pause.reached.add(event.rank)
    return answer_pause(state)


def drop_pause(state: JobState, now: float, event: BoundaryReached) -> list[AnyAction]:
    """Take back a pause that all ranks have dropped: they train on."""
    pause = state.steering.pause
    if pause is None or event.id != pause.id:
        return []
    state.steering.pause = None
    over = JobResumed(id=pause.id, step=event.step, at_s=now, who="")
    return [RecordEvent(event=over, reason=event.error)]


def hold_all(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Hold all replica groups at the lighthouse, before their next step.

    Each comes there before every step, so nothing has to be agreed upon, and one that starts or
    comes back meanwhile is held as well.
    """
    who, why = command.who or "an operator", str(command.args.get("why", ""))
    pause = Pause(command.id, max(state.step, 0), who, why, command.id)
    noted = _begin_pause(state, now, pause)
    for world in state.worlds.values():
        world.replica.stands = None
    held = hold_groups(state, f"paused by {who}")
    pause.hold = held.number
    return [held, noted]


def answer_pause(state: JobState) -> list[AnyAction]:
    """Answer who asked for a pause, once all that train stand."""
    pause = state.steering.pause
    waiting = sorted(c.id for c in state.commands.values() if c.kind == "pause")
    if pause is None or not waiting or not stands(state):
        return []
    reason = ""
    if pause.hold:
        steps = [
            world.replica.stands
            for world in state.list_members()
            if world.replica.stands is not None
        ]
        reason = "" if steps else "no replica trains yet, and none will begin"
        pause.step = min(steps, default=max(state.step, 0))
        state.step = max(state.step, pause.step)
    actions: list[AnyAction] = []
    for id_ in waiting:
        result = {
            "step": pause.step,
            "ranks": list(membership_of(state).list_asked(state)),
            "paused": True,
        }
        already = "" if id_ == pause.command else "it is paused already"
        actions += state.answer(id_, True, reason or already, result)
    return actions


def stands(state: JobState) -> bool:
    """Return whether all ranks of this generation, or all members of the quorum, stand still."""
    pause = state.steering.pause
    if pause is not None and pause.hold:
        return all(world.replica.stands is not None for world in state.list_members())
    return (
        pause is not None
        and bool(pause.reached)
        and pause.reached >= set(membership_of(state).list_asked(state))
    )


def begin_resume(state: JobState, now: float, who: str) -> list[AnyAction]:
    """End the pause that is in force."""
    pause = state.steering.pause
    assert pause is not None
    state.steering.pause = None
    boundary = state.boundary
    if boundary is not None and boundary.kind == "pause":
        state.boundary = None  # Committed, or there would be no pause: those who come to it pass.
    step = max(state.step, 0) if pause.hold else pause.step
    asked = membership_of(state).list_asked(state)
    state.steering.resume = Resume(pause.id, step, state.generation, asked, who)
    words = f"resumed by {who or 'an operator'}"
    early = state.answer_all("pause", False, words, {})
    event = JobResumed(id=pause.id, step=step, at_s=now, who=who)
    noted = RecordEvent(event=event, reason=words)
    if not pause.hold:
        return [*early, noted, *send_resume(state)]
    for world in state.worlds.values():
        world.replica.stands = None
    held = hold_groups(state, words)
    return [*early, held, noted, *finish_resume(state, "")]


def send_resume(state: JobState) -> list[AnyAction]:
    """Return the order behind the newest resume; safe to repeat."""
    resume = state.steering.resume
    if resume is None or resume.generation != state.generation:
        return []
    reason = f"resumed by {resume.who or 'an operator'}"
    return [
        ResumeRanks(generation=state.generation, ranks=resume.ranks, id=resume.id, reason=reason)
    ]


def reach_resume(state: JobState, event: BoundaryReached) -> list[AnyAction]:
    """Take one rank's word that it goes on; answer once all do."""
    resume = state.steering.resume
    if resume is None or event.id != resume.id + RESUMED:
        return []
    resume.reached.add(event.rank)
    return close_resume(state)


def close_resume(state: JobState) -> list[AnyAction]:
    """Close a resume once every rank that was told, and is there still, goes on."""
    resume = state.steering.resume
    if resume is None or resume.generation != state.generation:
        return []
    done = resume.reached and resume.reached >= set(resume.ranks) & set(
        membership_of(state).list_asked(state)
    )
    return finish_resume(state, "") if done else []


def finish_resume(state: JobState, reason: str) -> list[AnyAction]:
    """Answer who asked to resume: every rank trains, or will."""
    resume = state.steering.resume
    assert resume is not None
    state.steering.resume = None
    result = {
        "step": resume.step,
        "ranks": list(membership_of(state).list_asked(state)),
        "paused": False,
    }
    return state.answer_all("resume", True, reason, result)


def settle_resume(state: JobState) -> list[AnyAction]:
    """Settle a resume by a newer world, which trains and has never heard of the pause."""
    resume = state.steering.resume
    if resume is None or resume.generation == state.generation:
        return []
    return finish_resume(state, "by the world that began meanwhile")


def _begin_pause(state: JobState, now: float, pause: Pause) -> RecordEvent:
    state.steering.pause = pause
    why = f": {pause.why}" if pause.why else ""
    event = JobPaused(id=pause.id, step=pause.step, at_s=now, who=pause.who, reason=pause.why)
    return RecordEvent(event=event, reason=f"paused by {pause.who or 'an operator'}{why}")
