"""Who is to blame, when the news of who died first comes last."""

from msgspec import structs

from perdure.control.job import Ending, JobState
from perdure.model.events import RankExited


def correct_culprit(state: JobState, event: RankExited) -> None:
    """Blame who died first, should that be heard of only now: news of others can be faster.

    The decision stands; what changes is the history that later ones are made from, and how
    the job is said to have ended.
    """
    record = event.record
    known = state.failures[-1] if state.failures else None
    if known is None or state.world.first_exit_s is None or known.generation != record.generation:
        return
    if not record.failed or record.asked or record.at_s >= state.world.first_exit_s:
        return
    state.world.first_exit_s = record.at_s
    code = record.code or 128 + record.signal
    state.failures[-1] = state.world.failures[-1] = structs.replace(
        known,
        cause=record.cause,
        culprit=f"rank {record.rank}",
        error=record.error,
        code=code,
        signal=record.signal,
    )
    ending = state.ending
    if ending is not None and ending.status == "failed":
        first = f"rank {record.rank} had ended first: {record.cause}"
        state.ending = Ending("failed", code, f"{ending.reason}; {first}")
