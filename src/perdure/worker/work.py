"""Declared work: a script says how much a rank does in a step, in any unit that all ranks use.

    run.work(num_tokens)

A rank that got the longest sequences takes the longest, and nothing is wrong with it. What was
declared goes with the step's stages into the rank's ring, and the detector compares what ranks
take for the same amount of it (`perdure.detect.slowness.work`). Without perdure nothing is done.
"""

import math
from typing import SupportsFloat

from perdure.model.input.plain import make_plain
from perdure.model.signals.progress import WORK_MAX
from perdure.worker.attach import attach_ring
from perdure.worker.system.stderr import say

_complained = False


def declare_work(amount: SupportsFloat) -> None:
    """Declare `amount` of work for the step under way; several amounts of one step add up.

    An amount is a number from 0 to `WORK_MAX`. Anything else is said once on standard error, and
    of its step nothing is declared. So is a tensor on a device, for which the host would wait.
    """
    attachment = attach_ring()
    stages = None if attachment is None else attachment.stages
    if stages is None or not stages.here:
        return
    value = amount if type(amount) is int or type(amount) is float else _read(amount)
    if 0 <= value <= WORK_MAX:
        stages.add_work(value)
    else:
        stages.add_work(math.nan)
        _complain(amount)


def _read(amount: SupportsFloat) -> float:
    """Return a number as a float; nan where it is none, whatever it does instead."""
    try:
        on_host = str(getattr(amount, "device", "cpu")) == "cpu"
        if on_host and not isinstance(amount, bool | str | bytes | bytearray):
            return float(amount)
    except Exception:  # It is the script's, and may raise anything.
        return math.nan
    return math.nan


def _complain(amount: object) -> None:
    """Say once what is wrong."""
    global _complained
    if _complained:
        return
    _complained = True
    try:
        shown = make_plain(repr(amount), 60)
    except Exception:
        shown = make_plain(type(amount).__name__, 60)
    say(
        f"work: an amount of work is a number from 0 up, on the host, not {shown}; steps of which "
        "it is not known are left out, and nothing more is said of it"
    )
