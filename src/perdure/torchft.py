"""One line that makes a torchft script recover in a tenth of a second.

    import perdure.torchft
    manager = perdure.torchft.manager(pg=pg, load_state_dict=..., state_dict=..., ...)

`config` holds settings that may be changed while the job runs (`perdure set`): declared before the
first step, with the value they start with, read where they are used.

    from perdure.torchft import config
    config.declare("lr", float, default=1e-3, min=0)
    ... config.lr ...

Under `perdure run --torchft` the line about the manager is not needed: an unmodified script gets
the same when it imports torchft. Without perdure the script runs on, with torchft 0.2.0's fault
with gloo mended and a broken quorum given up by all of its members at once.
"""

import os
from typing import Any

from perdure.model.errors import ConfigError
from perdure.worker.busy import Busy, declare_busy
from perdure.worker.start.cold import after_import
from perdure.worker.torchft.manager import install, replica
from perdure.worker.torchft.settings import settings

config = settings.config
"""The script's live settings, the same in all replica groups at the same step."""


if os.environ.get("TORCHFT_LIGHTHOUSE"):
    after_import("torchft", install)


def manager(**options: Any) -> Any:
    """Return `torchft.Manager(**options)`, wired to perdure."""
    import torchft

    install(torchft)
    return torchft.Manager(**options)


def attach(manager: Any) -> Any:
    """Wire a manager that was made already, and return it.

    Its process group is watched from the next quorum on.
    """
    import torchft

    install(torchft)
    replica.adopt(manager)
    return manager


def busy(name: str, *, at_most_s: float) -> Busy:
    """Declare that this group is about to do something long, such as a validation or a save.

        with perdure.torchft.busy("evaluate", at_most_s=600):
            evaluate(model)

    Within it, and for `at_most_s` seconds at most, the others wait for this group. It is meant for
    what is done between two steps; in a collective they wait as long as their process group does.

    Raises:
        ConfigError: `name` is no text, or `at_most_s` no time between 0 and a week.
    """
    return declare_busy(name, at_most_s=at_most_s)


def steer_sync_every(local: Any) -> Any:
    """Make `sync_every` of a `torchft.local_sgd.LocalSGD` a live setting, and return it.

    It changes with a synchronization, for the steps up to the next one, in all groups.

    Raises:
        ConfigError: it is no LocalSGD; DiLoCo's fragments have their places within `sync_every`.
    """
    if not hasattr(local, "_local_step") or hasattr(local, "_fragments"):
        raise ConfigError(
            f"sync_every of a {type(local).__name__} cannot be changed while it runs",
            hint="that of a LocalSGD can",
        )

    def set_sync_every(value: int) -> None:
        local._sync_every = value

    note = "Inner steps from one synchronization to the next."
    config.declare(
        "sync_every", int, default=local._sync_every, min=1, note=note, on_change=set_sync_every
    )
    return local
