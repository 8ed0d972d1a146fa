"""Which torch perdure is tested with, wherever one is looked at."""

import re

TESTED_TORCH = "2.13"


def read_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) of what is none.

    >>> read_version("2.13.0+cu130"), read_version("nightly")
    ((2, 13), (0, 0))
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
