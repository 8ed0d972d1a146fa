"""Which recorder a rank gets: the compiled one where it is built, else a poll, else Python."""

from collections.abc import Mapping
from typing import Any

from perdure.worker.harm.faults import Faults
from perdure.worker.native.status import read_mode
from perdure.worker.recording.recorder import Dump, Members, StatusRecorder
from perdure.worker.ring import RingWriter
from perdure.worker.stderr import say


def make_recorder(
    ring: RingWriter, members: Members, dumps: Mapping[str, Dump], faults: Faults
) -> Any:
    """Return the recorder that `PERDURE_RECORDER` asks for, or the best there is; None for `off`.

    `faults` learn how to act in front of a collective, where the recorder can do that.
    """
    mode, wrong = read_mode()
    if wrong:
        say(f"{wrong}; taken as auto")
    if mode == "off":
        return None
    if mode in ("auto", "compiled"):
        recorder = _make_compiled(ring, members)
        if recorder is not None:
            faults.arm_collectives = recorder.set_before
            return recorder
        if mode == "compiled":
            _say_why_not()
    if mode == "python" or not dumps:
        from perdure.worker.recording.hook import HookRecorder

        hook = HookRecorder(ring, members, dumps)
        faults.arm_collectives = lambda before: setattr(hook, "before", before)
        return hook
    return StatusRecorder(ring, dict(dumps), members)


def _make_compiled(ring: RingWriter, members: Members) -> Any:
    from perdure.worker.native.recorder import CompiledRecorder, load_library

    library = load_library()
    if library is None:
        return None
    try:
        return CompiledRecorder(ring, members, library)
    except OSError:
        return None


def _say_why_not() -> None:
    from perdure.worker.native.build import build_command, explain_missing
    from perdure.worker.native.recorder import why_not_loaded

    reason = why_not_loaded() or f"{explain_missing()}; {build_command()} builds it"
    say(f"the compiled recorder is not used: {reason}")
