"""The keeper's choice of an image: which one ranks are forked from, and why there is none.

At most two exist at a time: the current one, and one that was forked from it and imports what
ranks have imported since, to take its place when it has proved itself. An image that turns out
unfit is made again without the packages that it blames, a few times.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from perdure.adapters.host import send_signal
from perdure.keeper.execution import start_image
from perdure.keeper.json_lines import LineSocket
from perdure.keeper.zygote import (
    ForkFailed,
    ForkImage,
    FromImage,
    ImageForked,
    Importing,
    Preload,
    RanksForked,
    Ready,
    StoreForked,
    Unfit,
)
from perdure.model.errors import ProtocolError
from perdure.model.input.raw import restore_variables

TRIES_MAX = 4
START_TIMEOUT_S = 180.0
DEATHS_MAX = 3


@dataclass(slots=True, eq=False)
class ImageProcess:
    """One image as the keeper sees it."""

    pid: int
    """0 where it is not known yet, or there is no such process any more."""
    lines: LineSocket
    names: tuple[str, ...]
    """The packages that it is to import."""
    tries: int
    deadline_s: float
    modules: frozenset[str] = frozenset()
    """Names of the modules that it has, once it is ready."""
    importing: str = ""


class Warmth:
    """The images of one keeper."""

    def __init__(
        self,
        job: str,
        node: int,
        env: Mapping[str, str],
        *,
        watch: Callable[[ImageProcess], None],
        unwatch: Callable[[ImageProcess], None],
        log: Callable[[str], None],
    ) -> None:
        """Start none yet. `watch` and `unwatch` tell the loop about sockets."""
        self.env = dict(env)
        self.current: ImageProcess | None = None
        self.coming: ImageProcess | None = None
        self.denied: dict[str, str] = {}
        """Packages that are not preloaded, and why."""
        self.why_cold = ""
        """Set for good when no image can be had."""
        self.busy = False
        """The current image is forking: it must not be replaced now."""
        self._job, self._node = job, node
        self._watch, self._unwatch, self._log = watch, unwatch, log
        self._deaths = 0

    @property
    def images(self) -> tuple[ImageProcess, ...]:
        """Return those that there are: at most two."""
        return tuple(image for image in (self.current, self.coming) if image is not None)

    @property
    def pids(self) -> set[int]:
        """Pids of the images."""
        return {image.pid for image in self.images} - {0}

    @property
    def settled(self) -> bool:
        """Whether it is known if the next start is warm or cold."""
        return bool(self.why_cold) or self.current is not None

    @property
    def can_refresh(self) -> bool:
        """Whether an image may be made that takes the place of the current one."""
        return self.current is not None and self.coming is None and not self.busy

    def start(self, names: tuple[str, ...], *, tries: int = 1) -> None:
        """Make an image that imports `names`; it becomes the current one when it is ready."""
        names = tuple(n for n in names if n.partition(".")[0] not in self.denied)
        try:
            pid, sock = self._fork_current() or start_image(self._job, self._node, self.env)
        except OSError as error:
            self._give_up(f"no image: {error.strerror}")
            return
        image = ImageProcess(
            pid, LineSocket(sock), names, tries, time.monotonic() + START_TIMEOUT_S
        )
        self.coming = image
        self._watch(image)
        image.lines.send(Preload(names))

    def refresh(self, names: tuple[str, ...]) -> None:
        """Make an image that also imports `names`, unless the current one has or tried to."""
        if not self.can_refresh or self.current is None or not names:
            return
        wanted = {n for n in names if n.partition(".")[0] not in self.denied}
        if not wanted <= self.current.modules.union(self.current.names):
            self.start(names)

    def restart(self, env: Mapping[str, str], names: tuple[str, ...]) -> None:
        """Start over with another environment, as the last ranks had it."""
        self.env = dict(env)
        self.close()
        self.start(names)

    def read(self, image: ImageProcess) -> list[RanksForked | StoreForked | ForkFailed]:
        """Take in what `image` says; return answers to requests for a fork."""
        answers: list[RanksForked | StoreForked | ForkFailed] = []
        try:
            messages: list[FromImage] = image.lines.read(FromImage)
        except ProtocolError as error:
            self._lose(image, str(error))
            return answers
        for message in messages:
            match message:
                case ImageForked():
                    image.pid = message.pid
                case Importing():
                    image.importing = message.name
                case Ready():
                    image.modules = message.modules
                    self.tick(0.0)
                case Unfit():
                    self._retry(image, message.reason, message.blamed)
                    return answers
                case _:
                    answers.append(message)
        if image.lines.closed:
            self._lose(image, "died")
        return answers

    def note_reaped(self, pid: int) -> None:
        """Forget the pid of an image that was waited for: it may be another process's soon."""
        for image in self.images:
            if image.pid == pid:
                image.pid = 0

    def tick(self, now: float) -> None:
        """Change to an image that is ready; give up one that does not become so."""
        if self.coming is not None and self.coming.modules and not self.busy:
            if self.current is not None:
                self._drop(self.current)
            self.current, self.coming = self.coming, None
            modules = f"{len(self.current.modules)} modules"
            left_out = f"; left out: {'; '.join(self.denied.values())}" if self.denied else ""
            self._log(f"image {self.current.pid} is ready with {modules}{left_out}")
        if self.coming is not None and not self.coming.modules and now > self.coming.deadline_s:
            self._retry(self.coming, f"importing {self.coming.importing} takes for ever", {})

    def drop_current(self) -> None:
        """End the current image (it does not answer) and start a new one."""
        if self.current is not None:
            self._lose(self.current, "does not answer")

    def close(self) -> None:
        """End all images."""
        for image in self.images:
            self._drop(image)
        self.current = self.coming = None

    def _fork_current(self) -> tuple[int, socket.socket] | None:
        """Have the current image fork another; None where it cannot be asked now.

        The pid is told by the new one. Until then it lives below the current one, whose
        descendants are nobody's ranks.
        """
        if self.current is None or self.current.lines.closed:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            if self.current.lines.send_with(ForkImage(), theirs.fileno()):
                return 0, ours
        ours.close()
        return None

    def _retry(self, image: ImageProcess, reason: str, blamed: Mapping[str, str]) -> None:
        """`image` is unfit: try without what it blames, then without any preload, then not."""
        self._log(f"image {image.pid} is unfit: {reason}")
        self._drop(image)
        self.coming = None
        if not image.names:
            self._give_up(reason)
            return
        if not blamed and image.importing:
            package = image.importing.partition(".")[0]
            blamed = {package: f"{package} ({reason})"}
        self.denied.update(blamed)
        if image.tries < TRIES_MAX:
            self.start(image.names, tries=image.tries + 1)
        elif self.current is None:
            self.start(())

    def _lose(self, image: ImageProcess, reason: str) -> None:
        if image is self.coming:
            self._retry(image, reason, {})
            return
        if image is not self.current:
            return
        self._log(f"image {image.pid}: {reason}")
        self._drop(image)
        self.current = None
        self._deaths += 1
        if self._deaths >= DEATHS_MAX:
            self._give_up(f"its image was lost {self._deaths} times")
        elif self.coming is None:
            self.start(image.names)

    def _give_up(self, reason: str) -> None:
        if self.current is None:
            self.why_cold = reason

    def _drop(self, image: ImageProcess) -> None:
        self._unwatch(image)
        image.lines.close()
        if image.pid:
            send_signal(image.pid, 9)


def zygote_environ(environ: Mapping[str, str], spec: str) -> dict[str, str]:
    """Return the environment of an image: the keeper's and what the ranks of this job get.

    `spec` is `job.json`, read leniently: it only makes the guess better.
    """
    env = dict(environ)
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        job = json.loads(spec)
        env.update(restore_variables({str(k): str(v) for k, v in job.get("env", {}).items()}))
        if int(job.get("nproc", 1)) > 1:
            env.setdefault("OMP_NUM_THREADS", "1")
    return env
