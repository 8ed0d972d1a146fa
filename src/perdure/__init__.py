"""perdure keeps PyTorch training running on hardware that does not.

A training script needs `init` from here, and meets the `Run` that it returns. One whose loop is its
own may call `work` (as `Run.work`). They are looked up on first use, so that controller, command
line and simulator import this package without torch.
"""

TYPE_CHECKING = False  # A warm image must import this before it logs what Python itself imports.
if TYPE_CHECKING:
    from typing import Any

    from perdure.worker.run import Run as Run
    from perdure.worker.run import init as init
    from perdure.worker.work import declare_work as work

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "init", "work"]


def __getattr__(name: str) -> "Any":
    """Return `init`, `Run` or `work`, importing the training side only now."""
    if name in ("Run", "init"):
        from perdure.worker import run

        return getattr(run, name)
    if name == "work":
        from perdure.worker.work import declare_work

        return declare_work
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
