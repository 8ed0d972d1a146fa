"""The one door to OpenSSH: a short command on a box, its answer, and whether it came at all.

The client of OpenSSH itself is run, so that aliases, ProxyJump, ProxyCommand, agents and hardware
keys work as the user has set them up. Its exit code 255 is its own as well as a remote program's:
therefore every command ends with a trailer on standard error. Without it nothing is known, least
of all that something is dead. The same commands run on this machine where no host is named (a
login node that one is on already).
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from perdure.failpoints import failpoint
from perdure.files.private import find_private, make_private
from perdure.launch.exchange import (
    SAID_MAX,
    FloodError,
    UnfinishedError,
    UnreachedError,
    close_pipes,
    exchange,
    last_line,
    listen,
    make_flood,
    read_lines,
)
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.platforms.launching import PulledFile
from perdure.model.platforms.profile import LaunchSection

T = TypeVar("T")
BEGIN = "@@perdure begin@@"
"""On standard output before the command's own: what shells print at login stands above it."""
ANSWER = "@@perdure-json "
"""Begins the line that is the answer of a program of ours."""
BANNER_MAX = 1 << 20
"""Bytes above that mark of a stream."""
_TRAILER = re.compile(r"@@perdure rc=(\d+) boot=(\S*)@@")
_ANSWER_S = 60.0
ATTEMPTS = 4
"""For what may be asked twice. Pauses between them: 1, 2 and 4 s."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ran to its end on the box."""

    code: int
    out: str
    err: str
    boot_id: str
    banner: str = ""
    """What a shell of the box prints at every login, before anything of ours."""


class Channel:
    """How commands get to one box, and files come from it."""

    python = "python3"
    """The Python there."""

    def __init__(self, section: LaunchSection) -> None:
        """Connect to nothing yet: each command makes, or shares, a connection of its own."""
        self.host = section.host or next(iter(section.hosts), "")
        self._section = section

    @property
    def name(self) -> str:
        """What the box is called to a person."""
        return self.host or "this machine"

    def ssh(self, *, shared: bool = True) -> list[str]:
        """Return the ssh command up to the host's name.

        `shared` connections are multiplexed over one that stays for a minute; bulk data must not
        be among them, since a stuck transfer would hold up every poll.
        """
        section, alone = self._section, ["ControlMaster=no", "ControlPath=none"]
        options = [
            *section.ssh_options,
            "BatchMode=yes",
            f"ConnectTimeout={section.connect_timeout_s}",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            *(_list_shared_options() if shared else alone),
        ]
        words = [word for option in options for word in ("-o", option)]
        return ["ssh", *list_config(section), *words]

    def command(self, script: str, *, shared: bool = True) -> list[str]:
        """Return the command of this machine that runs the shell script `script` on the box."""
        if not self.host:
            return ["sh", "-c", wrap(script)]
        return [*self.ssh(shared=shared), self.host, f"exec sh -c {shlex.quote(wrap(script))}"]

    def locate(self, folder: str) -> str:
        """Return what is in the absolute folder `folder` on the box, as rsync calls it."""
        return f"{self.host}:{folder}/" if self.host else f"{folder}/"

    def carry_rsync(self, *, shared: bool = True) -> list[str]:
        """Return the options by which rsync gets to the box."""
        return ["-e", shlex.join(self.ssh(shared=shared))] if self.host else []

    def run(
        self,
        script: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        bytes_max: int = SAID_MAX,
    ) -> Done:
        """Run `script` once; return how it ended.

        Raises:
            UnreachedError: the connection was not made, or broke before the end was told.
            FloodError: more than `bytes_max` was said.
        """
        failpoint("box/ask")
        process = self._start(self.command(script))
        try:
            said, complained = exchange(
                process, stdin, name=self.name, timeout_s=timeout_s, bytes_max=bytes_max
            )
        except subprocess.TimeoutExpired:
            raise UnfinishedError(f"{self.name}: no answer in {timeout_s:.0f} s") from None
        finally:
            self._kill(process)
            close_pipes(process)
        err = complained.decode(errors="replace")
        banner, _, out = said.decode(errors="replace").partition(BEGIN + "\n")
        trailer = _TRAILER.search(err)
        if trailer is None:
            raise UnreachedError(
                f"{self.name} did not answer: {last_line(err, 'it said nothing')}",
                hint=self._make_hint(),
            )
        err = err[: trailer.start()].rstrip()
        failpoint("box/answered")
        return Done(int(trailer[1]), out, err, trailer[2], banner.strip())

    def _start(
        self, command: list[str], *, stdin: int = subprocess.PIPE, stderr: int = subprocess.PIPE
    ) -> "subprocess.Popen[bytes]":
        """Start `command` with its streams as pipes; of this machine, in a session of its own.

        Raises:
            PlatformError: there is no ssh.
        """
        try:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=not self.host,
            )
        except FileNotFoundError as error:
            raise PlatformError(f"{error.filename} is not installed here") from error

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """End a command that may still run, with all that it has started on this machine.

        The shell of `command` waits for one of its own: were only the outer one ended, the inner
        would go on, and hold the pipes.
        """
        if process.poll() is None:
            if self.host:
                process.terminate()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _make_hint(self) -> str:
        return f"this says nothing about a job there; try: {shlex.join(self._try())}"

    def _try(self) -> list[str]:
        return ["ssh", *list_config(self._section), self.host, "true"]

    def ask(
        self,
        script: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        bytes_max: int = SAID_MAX,
    ) -> Done:
        """Run what may be run twice, again where the connection broke; return how it ended.

        Raises:
            UnreachedError: every attempt broke.
            FloodError: more than `bytes_max` was said.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self.run(script, stdin=stdin, timeout_s=timeout_s, bytes_max=bytes_max)
            except FloodError:
                raise
            except UnreachedError:
                if attempt == ATTEMPTS - 1:
                    raise
                self.disconnect()
                time.sleep(2.0**attempt)
        raise AssertionError

    def must(self, script: str, *, hint: str, stdin: bytes = b"", timeout_s: float = 60.0) -> str:
        """Return the output of what may be run twice and has to succeed.

        Raises:
            UnreachedError: no connection.
            PlatformError: it fails; its last line is told.
        """
        done = self.ask(script, stdin=stdin, timeout_s=timeout_s)
        if done.code:
            raise PlatformError(
                f"{self.name}: {last_line(done.err or done.out, 'it said nothing')}", hint=hint
            )
        return done.out.strip()

    def query(
        self,
        script: str,
        type_: type[T],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        bytes_max: int = SAID_MAX,
    ) -> T:
        """Return the answer of one of our programs, decoded as `type_`.

        Raises:
            UnreachedError: no connection.
            PlatformError: the program failed; its last line is told.
            ProtocolError: the answer is of another shape.
        """
        done = self.ask(script, stdin=stdin, timeout_s=timeout_s, bytes_max=bytes_max)
        lines = [line for line in done.out.splitlines() if line.startswith(ANSWER)]
        if done.code or not lines:
            raise PlatformError(
                f"{self.name}: exit code {done.code}: {last_line(done.err, 'no answer')}"
            )
        try:
            return msgspec.json.decode(lines[-1][len(ANSWER) :], type=type_)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ProtocolError(
                f"{self.name} answers what is no answer: {error}",
                hint="is it the same perdure there?",
            ) from error

    @contextlib.contextmanager
    def hold(self, source: bytes, *argv: str) -> Iterator[Any]:
        """Run a program of ours there while the body runs; yield its one answer, decoded.

        It has a connection of its own, and ends when its standard input does: with the body, with
        this process, or with the connection.

        Raises:
            UnreachedError: there was no answer.
        """
        loader = (
            "import sys; source = sys.stdin.buffer.read(int(sys.argv.pop(1))); "
            'exec(compile(source, "box.py", "exec"), globals())'
        )
        words = shlex.join(["python3", "-c", loader, str(len(source)), *argv])
        process = self._start(self.command(words, shared=False), stderr=subprocess.DEVNULL)
        try:
            yield self._read_answer(process, source)
        finally:
            close_pipes(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            self._kill(process)

    def _read_answer(self, process: "subprocess.Popen[bytes]", source: bytes) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        unreached = UnreachedError(f"{self.name}: no answer", hint="try again")
        ender = threading.Timer(_ANSWER_S, self._kill, (process,))
        ender.start()
        try:
            process.stdin.write(source)
            process.stdin.flush()
            mark = ANSWER.encode()
            line = self._skip_banner(read_lines(process.stdout), lambda line: line.startswith(mark))
            if line:
                return msgspec.json.decode(line[len(mark) :])
        except BrokenPipeError:
            raise unreached from None
        finally:
            ender.cancel()
        raise unreached

    def _skip_banner(self, lines: Iterator[bytes], begins: Callable[[bytes], bool]) -> bytes:
        """Return the first of some lines that `begins` what was asked for; empty: none does.

        Raises:
            FloodError: more than `BANNER_MAX` was said before it.
        """
        count = 0
        for line in lines:
            count += len(line)
            if begins(line):
                return line
            if count > BANNER_MAX:
                raise make_flood(self.name, BANNER_MAX)
        return b""

    def stream(
        self, script: str, on_line: Callable[[str], None], *, silence_s: float | None = None
    ) -> int | None:
        """Run `script`, each of its lines to `on_line`; return its exit code, None if unknown.

        Raises:
            FloodError: more than `BANNER_MAX` was said before the script's own first line.
            UnfinishedError: for `silence_s` nothing came, neither a byte nor the end.
        """
        process = self._start(self.command(script), stdin=subprocess.DEVNULL)
        assert process.stdout is not None
        assert process.stderr is not None
        codes: list[int] = []
        errors = threading.Thread(
            target=_pass_errors, args=(process.stderr, codes), name="perdure-ssh-errors"
        )
        errors.start()
        try:
            lines = read_lines(listen(process.stdout, silence_s))
            self._skip_banner(lines, lambda line: line.rstrip(b"\n") == BEGIN.encode())
            for data in lines:
                on_line(data.decode(errors="replace"))
            process.wait(silence_s)
        except subprocess.TimeoutExpired:
            raise UnfinishedError(
                f"{self.name} says nothing, and does not end, for {silence_s:.0f} s",
                hint=self._make_hint(),
            ) from None
        finally:
            self._kill(process)
            process.stdout.close()  # Who still writes is ended by it, and ends the other stream.
            errors.join()
            close_pipes(process)
        return codes[-1] if codes else None

    def bring(
        self,
        source: str,
        target: Path,
        files: Sequence[PulledFile],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Bring `files`, named relative to the absolute folder `source` there, into `target`."""
        from perdure.launch import transfer  # Which goes over a channel.

        transfer.pull(self, source, target, [file.path for file in files], tell=tell)

    def attend(self, script: str) -> int:
        """Run `script` with this terminal as its own; return ssh's exit code."""
        words = [*self.ssh(), "-tt", self.host, f"exec sh -c {shlex.quote(script)}"]
        return subprocess.run(words if self.host else ["sh", "-c", script]).returncode

    def serve(self, script: str) -> "subprocess.Popen[bytes]":
        """Start `script` with a terminal of its own connection, so that it ends with that."""
        words = [*self.ssh(shared=False), "-tt", self.host, f"exec sh -c {shlex.quote(script)}"]
        words = words if self.host else ["sh", "-c", script]
        return self._start(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def connect_port(self, near: int, far: int) -> "subprocess.Popen[bytes]":
        """Start to forward the loopback port `near` here to `far` of the box.

        It writes a line once it listens: ssh runs its local command after that. No option of the
        user's may come before, nor a shell that is not here.
        """
        told = ("PermitLocalCommand=yes", "LocalCommand=echo forwarded", "ClearAllForwardings=no")
        options = (*told, "ExitOnForwardFailure=yes", "ControlMaster=no", "ControlPath=none")
        program, *words = self.ssh(shared=False)
        first = [program, *(word for option in options for word in ("-o", option))]
        way = ["-N", "-L", f"127.0.0.1:{near}:127.0.0.1:{far}", self.host]
        shell = os.environ | {"SHELL": "/bin/sh"}
        return subprocess.Popen([*first, *words, *way], stdout=subprocess.PIPE, env=shell)

    def render_forward(self, ports: Sequence[int]) -> list[str]:
        """Return the command by which a person forwards ports of the box to the same ports here."""
        options = [word for option in self._section.ssh_options for word in ("-o", option)]
        ways = [word for port in ports for word in ("-L", f"127.0.0.1:{port}:127.0.0.1:{port}")]
        return ["ssh", *list_config(self._section), *options, "-N", *ways, self.host]

    def disconnect(self) -> None:
        """End the shared connection, if there is one: the next command makes a fresh one."""
        if self.host:
            words = [*self.ssh(), "-O", "exit", self.host]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(words, capture_output=True, timeout=10)


def list_config(section: LaunchSection) -> list[str]:
    """Return the option of ssh that names another configuration than the user's own."""
    return ["-F", os.path.expanduser(section.ssh_config)] if section.ssh_config else []


def wrap(script: str) -> str:
    """Return `script` with the mark before its output, and the trailer after it."""
    return (
        f"echo {shlex.quote(BEGIN)}; ( {script}\n); rc=$?; "
        'printf "\\n@@perdure rc=%s boot=%s@@\\n" "$rc" '
        '"$(cat /proc/sys/kernel/random/boot_id)" >&2; exit $rc'
    )


def _pass_errors(pipe: IO[bytes], codes: list[int]) -> None:
    """Pass standard error on, but for the trailer, whose exit code goes to `codes`."""
    for data in read_lines(pipe):
        line = data.decode(errors="replace")
        trailer = _TRAILER.search(line)
        if trailer is not None:
            codes.append(int(trailer[1]))
        elif line.strip():
            print(line, end="", file=sys.stderr, flush=True)


def _list_shared_options() -> list[str]:
    """Return what shares a connection, in a private folder: paths of sockets have to be short."""
    private = find_private("/tmp")
    folder = f"{private}/ssh"
    for one in (private, folder):
        make_private(one)
    return ["ControlMaster=auto", f"ControlPath={folder}/%C", "ControlPersist=60"]
