"""How many examples a property tries: the campaign looks for new ones, `make test` for harm."""

import os


def examples(number: int) -> int:
    """Return `number` in an exploration (`PERDURE_EXPLORE=1`), and a third of it otherwise."""
    return number if os.environ.get("PERDURE_EXPLORE") else number // 3
