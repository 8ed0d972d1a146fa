"""Named points in the shells at which a fault can be made to happen, in real processes.

`PERDURE_FAILPOINTS` switches them, as etcd's gofail does it; `terms` has its syntax, `points` what
there is, and `docs/failpoints.md` both. Nothing is switched in a job that somebody needs: a point
then costs one look into an empty dictionary. The pure core has no points, and neither has the path
of a rank's step.
"""

import os
from collections.abc import Callable, Mapping

SWITCH = "PERDURE_FAILPOINTS"
FOLDER = "PERDURE_FAILPOINTS_FOLDER"

_switched: dict[str, Callable[[str], int | None]] = {}


def failpoint(name: str, about: str = "") -> int | None:
    """Have happen what is switched at the point `name`; `about` tells its uses apart.

    Returns the number that a term `take(N)` has taken there, such as the bytes of a short write;
    None otherwise.

    Raises:
        OSError: a term `error(ERRNO)` wants it.
    """
    if name in _switched:
        return _switched[name](about)
    return None


def switch(environ: Mapping[str, str]) -> None:
    """Switch the points as `environ` says, and no others.

    Raises:
        ConfigError: the variable cannot be read, or names a point that there is not.
    """
    _switched.clear()
    if environ.get(SWITCH) or environ.get(FOLDER):
        from perdure.failpoints.terms import make_actions

        _switched.update(make_actions(environ.get(SWITCH, ""), environ.get(FOLDER, "")))


switch(os.environ)
