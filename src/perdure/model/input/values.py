"""Which values a person may give: numbers that arithmetic and clocks hold, texts that Linux does.

A price of infinity, a time that is not a number or a count of thirty digits passes every `>= 0`,
and shows hours later, as a sum that never ends or a timer that cannot be set. A NUL ends a text for
the kernel, so that no path, variable or argument holds one.
"""

import math
from typing import Any

FLOAT_MAX = 1e9
"""Of seconds it is 31 years; a timer of the kernel holds 292."""
INT_MAX = 2**53
"""Above it, a float has not every whole number."""


def refuse_value(value: Any) -> str:
    """Return why a number or text cannot be taken; empty where it can, or is neither.

    >>> refuse_value(float("nan")), refuse_value(3), refuse_value(-1e300)
    ('nan is not finite', '', '-1e+300 is too large')
    """
    match value:
        case float() if not math.isfinite(value):
            return f"{value} is not finite"
        case float() if abs(value) > FLOAT_MAX:
            return f"{value:g} is too large"
        case int() if abs(value) > INT_MAX:
            return f"{value} is too large"
        case str() if "\0" in value:
            return "a text with a NUL in it"
    return ""


def find_bad_value(document: Any) -> tuple[list[str], str]:
    """Return the path of a document's first value that cannot be taken, and why; or nothing.

    >>> find_bad_value({"launch": {"budget": float("inf")}})
    (['launch', 'budget'], 'inf is not finite')
    """
    match document:
        case dict():
            inner = [(str(key), value) for key, value in document.items()]
            inner += [(key, key) for key in document if isinstance(key, str)]
        case list() | tuple():
            inner = [(str(number), value) for number, value in enumerate(document)]
        case _:
            return [], refuse_value(document)
    for key, value in inner:
        keys, why = find_bad_value(value)
        if why:
            return [key, *keys], why
    return [], ""


VALUE_HINT = (
    f"a finite number, at most {FLOAT_MAX:g} and a whole one {INT_MAX:.0e}; a text without NUL"
)
