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

from typing import Any

from perdure.worker.replica import install, replica
from perdure.worker.replica_config import settings

config = settings.config
"""The script's live settings, the same in all replica groups at the same step."""


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
