"""What the process table says of a process."""

import contextlib
import os


def set_title(title: str) -> None:
    """Show `title` over the command line, as much of it as fits, where that can be done.

    Not over the environment as well: SPT_NOENV keeps /proc/PID/environ readable.
    """
    with contextlib.suppress(ImportError):
        os.environ["SPT_NOENV"] = "1"
        import setproctitle

        setproctitle.setproctitle(title)
    os.environ.pop("SPT_NOENV", None)
