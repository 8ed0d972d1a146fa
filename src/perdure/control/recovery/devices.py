"""Whether a CUDA error that no process survives is its device's, or the script's own.

An illegal access, or a launch that failed, may be either, and the error does not say which. So the
first one is only told. The second one on the same device within `WINDOW_S` is the device's, where
no other device had any: a script's bug does not keep to one device for long, unless it is bound to
one rank. Such a bug comes at the same step again, and then nobody is blamed; `policy.recovery` ends
a job that meets the same fault there over and over. A script that declares no steps gives no such
sign: its node gives its place to a spare one, since the world starts again anyhow. Should the next
error come on another device, it was the script's, and the node is used again.

The device of a rank is the one of its LOCAL_RANK, as `perdure status --devices` shows it. Where a
node says no device of its own, nothing is counted.
"""

import msgspec

from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.model.events import RankExited
from perdure.model.failures import StickyError
from perdure.model.orders import AnyAction

WINDOW_S = 3600.0
_KEPT = 64


def note_sticky_error(state: JobState, event: RankExited) -> None:
    """Remember it where `event` is such an error on a device that is known."""
    record, node = event.record, state.nodes.get(event.node)
    if not record.sticky_error or node is None or not node.device_ids:
        return
    spec = state.the_spec()
    local = spec.slot_of(record.rank) % spec.nproc
    device = node.device_ids[local % len(node.device_ids)]
    known = {(one.generation, one.rank) for one in state.sticky_errors}
    if not device or device.startswith("cpu-") or (record.generation, record.rank) in known:
        return
    new = StickyError(
        device=device, node=event.node, rank=record.rank, generation=record.generation,
        at_s=record.at_s, step=event.account.step,
    )  # fmt: skip
    recent = [one for one in state.sticky_errors if record.at_s - one.at_s <= WINDOW_S]
    state.sticky_errors = [*recent, new][-_KEPT:]


def judge_sticky_error(state: JobState, event: RankExited) -> tuple[bool, str]:
    """Return whether the error of `event` is its device's, and why; `note` has taken it before."""
    record = event.record
    if not record.sticky_error:
        return False, ""
    errors = state.sticky_errors
    me = (record.generation, record.rank)
    mine = next((one for one in errors if (one.generation, one.rank) == me), None)
    if mine is None:
        return False, ""
    others = sorted({one.device for one in errors} - {mine.device})
    if others:
        return False, f"{', '.join(others)} had such an error as well: it is the script's own"
    earlier = [e for e in errors if e.device == mine.device and e.generation != mine.generation]
    if not earlier:
        return (
            False,
            f"it is the first on {mine.device} within an hour, and may be the script's own",
        )
    if mine.step >= 0 and any(one.step == mine.step for one in earlier):
        return False, f"{mine.device} had it at step {mine.step} before: it is the script's own"
    return True, f"it is the second on {mine.device} within an hour, and no other device had one"


def free_wrongly_blamed(state: JobState, event: RankExited) -> list[AnyAction]:
    """Use nodes again that were left out for such errors, now that another device has one."""
    if not event.record.sticky_error or len({one.device for one in state.sticky_errors}) < 2:
        return []
    reason = "the same CUDA error came on another device: it is the script's own"
    nodes = sorted({one.node for one in state.sticky_errors if one.blamed})
    cleared = [msgspec.structs.replace(one, blamed=False) for one in state.sticky_errors]
    state.sticky_errors = cleared
    return [a for node in nodes for a in membership_of(state).free(state, node, "", reason)]


def note_blame(state: JobState, event: RankExited) -> None:
    """Remember that the node of `event` is left out for its error."""
    state.sticky_errors = [
        msgspec.structs.replace(one, blamed=True)
        if (one.generation, one.rank) == (event.record.generation, event.record.rank)
        else one
        for one in state.sticky_errors
    ]
