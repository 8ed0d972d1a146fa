"""The lighthouse's process, of which the one that serves is the child.

Its death costs a fork: the child's parent has imported all of this and only waits for the child's
end (or for it to be stopped). Should that one die as well, the supervisor starts both again. The
next lighthouse takes the same port, reads the last quorum from `lighthouse.json`, and waits for its
members; ids below the reserved bound are never used again.
"""

import asyncio
import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import time

from perdure.adapters.host import pick_free_ports
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.job import JobSpec, Lighthouse
from perdure.model.orders import LIGHTHOUSE
from perdure.service.jobfiles import (
    load_endpoint,
    load_spec,
    read_document,
    write_document,
)
from perdure.service.jobfolders import paths_of, resolve_home
from perdure.service.lighthouse.loop import LighthouseService
from perdure.service.lighthouse.remembered import LighthouseFile
from perdure.service.part import read_run_pid, run_part, set_up_log, watch_process
from perdure.worker.system.process import die_with, set_title

log = logging.getLogger("perdure.lighthouse")

_LIVES = 1000
_STOCK = "torchft_lighthouse"


def main(job: str) -> int:
    """Run the lighthouse of `job` as a process; return its exit code."""
    set_up_log()
    try:
        paths = paths_of(resolve_home(), job)
        spec = load_spec(paths)
        if spec.lighthouse is not None and not spec.lighthouse.own:
            _become_stock(spec.lighthouse, paths.lighthouse)
        return _keep_serving(spec, paths.lighthouse)
    except PerdureError as error:
        log.error("%s (%s)", error.message, error.hint)
        return error.exit_code


def _keep_serving(spec: JobSpec, path: str) -> int:
    """Have a child serve, and another one at once should it be killed or stopped."""
    asked: list[int] = []
    parent, child = os.getpid(), 0

    def leave(number: int, frame: object) -> None:
        asked.append(number)
        if child:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    for _ in range(_LIVES):
        child = os.fork()
        if child == 0:
            die_with(parent)
            os._exit(_serve(spec, path))
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            log.warning("the lighthouse (pid %d) is stopped: replacing it", child)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        elif asked or os.WIFEXITED(status):
            return os.waitstatus_to_exitcode(status)
        log.warning("the lighthouse (pid %d) has died: the next one serves", child)
    return 1


def _serve(spec: JobSpec, path: str) -> int:
    """Be the lighthouse; return the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_title(f"perdure lighthouse {spec.name}: serving")
    try:
        return run_part(_main(spec, path), log, "")
    except BaseException:
        log.exception("the lighthouse has failed")
        return 1


async def _main(spec: JobSpec, path: str) -> None:
    endpoint = load_endpoint(paths_of(resolve_home(), spec.name), LIGHTHOUSE)
    offset_s = endpoint.clock_offset_s
    task = asyncio.current_task()
    assert task is not None
    service = LighthouseService(
        spec,
        path,
        clock=lambda: time.monotonic() + offset_s,
        incarnation=f"l{os.getpid()}-{secrets.token_hex(3)}",
        clock_offset_s=offset_s,
    )

    async def connect() -> None:
        # Its import takes longer than all the rest: replicas are served meanwhile.
        nats = await asyncio.to_thread(importlib.import_module, "perdure.adapters.nats")
        name = f"perdure lighthouse {spec.name}"
        await service.join(await nats.NatsBus.connect(endpoint, name=name))

    with watch_process(read_run_pid(), task.cancel):
        port = await service.start()
        log.info("listening on port %d", port)
        if spec.served:
            await service.hear_ranks(paths_of(resolve_home(), spec.name), port)
        service.tasks.spawn(connect())
        try:
            await service.run()
        finally:
            await service.close()


def _become_stock(lighthouse: Lighthouse, path: str) -> None:
    """Become torchft's own lighthouse, on the port of the one before or a new one.

    Raises:
        ConfigError: torchft is not installed.
    """
    program = shutil.which(_STOCK, path=f"{os.path.dirname(sys.executable)}:{os.defpath}")
    if program is None:
        raise ConfigError(f"there is no {_STOCK}", hint="pip install torchft==0.2.0")
    known = read_document(path, LighthouseFile)
    port = (known and known.port) or pick_free_ports("127.0.0.1", 1)[0]
    write_document(path, LighthouseFile(port=port))
    os.execv(program, [program, "--bind", f"127.0.0.1:{port}", *lighthouse.stock_words])
