"""Python stacks of a running or stopped process, by py-spy as a process of its own.

py-spy reads the other's memory; where that is not permitted the text says so, so that a
diagnosis shows what is missing rather than nothing.
"""

import os
import shutil
import sys

from perdure.model.fitting import cut_text

TIMEOUT_S = 3.0
_TEXT_MAX = 20_000


def find_py_spy() -> str:
    """Return the path of py-spy: beside this Python, or on PATH; empty where there is none."""
    path = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return path if os.access(path, os.X_OK) else shutil.which("py-spy") or ""


async def dump_stack(
    pid: int, *, nonblocking: bool, native: bool = False, timeout_s: float = TIMEOUT_S
) -> str:
    """Return the stacks of all threads of `pid`, or one line that says why there are none.

    `nonblocking` is for a process that is stopped already (state T), which cannot be paused
    again; otherwise py-spy pauses it for some milliseconds, so that the picture is of one moment.
    With `native`, frames of C and C++ stand between those of Python (slower).
    """
    import asyncio  # Whoever looks only whether py-spy is there does not wait for it.

    program = find_py_spy()
    if not program:
        return "no stack: py-spy is not installed"
    options = {"--nonblocking": nonblocking, "--native": native}
    chosen = [option for option, asked in options.items() if asked]
    try:
        process = await asyncio.create_subprocess_exec(
            *(program, "dump", "--pid", str(pid), *chosen),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return f"no stack: cannot run py-spy: {error.strerror}"
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except (TimeoutError, asyncio.CancelledError) as error:
        process.kill()
        await process.wait()
        if isinstance(error, asyncio.CancelledError):
            raise
        return f"no stack: py-spy took longer than {timeout_s:g} s"
    if process.returncode == 0:
        return cut_text(out.decode(errors="replace").strip(), _TEXT_MAX)
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    why = "; ".join(lines[-3:]) or f"exit code {process.returncode}"
    return f"no stack: py-spy: {why}"
