"""Which numbers a person may give: finite, and of a size that arithmetic and clocks can hold.

A price of infinity, a time that is not a number or a count of thirty digits passes every `>= 0`,
and shows hours later, as a sum that never ends or a timer that cannot be set.
"""

import math
from typing import Any

FLOAT_MAX = 1e9
"""Of seconds it is 31 years; a timer of the kernel holds 292."""
INT_MAX = 2**53
"""Above it, a float has not every whole number."""


def refuse_number(value: Any) -> str:
    """Return why a number cannot be taken; empty where it can, or is no number.

    >>> refuse_number(float("nan")), refuse_number(3), refuse_number(-1e300)
    ('nan is not finite', '', '-1e+300 is too large')
    """
    match value:
        case float() if not math.isfinite(value):
            return f"{value} is not finite"
        case float() if abs(value) > FLOAT_MAX:
            return f"{value:g} is too large"
        case int() if abs(value) > INT_MAX:
            return f"{value} is too large"
    return ""


def find_bad_number(document: Any) -> tuple[list[str], str]:
    """Return the path of a document's first number that cannot be taken, and why; or nothing.

    >>> find_bad_number({"launch": {"budget": float("inf")}})
    (['launch', 'budget'], 'inf is not finite')
    """
    match document:
        case dict():
            inner = [(str(key), value) for key, value in document.items()]
        case list() | tuple():
            inner = [(str(number), value) for number, value in enumerate(document)]
        case _:
            return [], refuse_number(document)
    for key, value in inner:
        keys, why = find_bad_number(value)
        if why:
            return [key, *keys], why
    return [], ""


NUMBER_HINT = f"a finite number; at most {FLOAT_MAX:g}, a whole one {INT_MAX:.0e}"
