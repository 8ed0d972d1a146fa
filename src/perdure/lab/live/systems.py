"""What is played against a trace: perdure's elastic depth, torchrun with checkpoints, torchft.

Each trains `perdure.lab.live.paced`, notes its commits in the same form, and is told of the same
places: who has left is dead already, or (perdure) has been told of its leaving.

Places are for emulated nodes, whose processes are killed together, or let start. One without a
machine is a locked file. What `perdure run` starts as the node's agent first waits for that lock,
so that a node that was killed comes back when its place is opened, and not when its supervisor
would like it to.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Protocol

import msgspec

from perdure.adapters.host import pick_free_port
from perdure.lab.report import MadeStep
from perdure.launch.local import render
from perdure.model.bus.wire import Command
from perdure.model.codec import decode
from perdure.model.errors import PerdureError, PlatformError, ProtocolError
from perdure.model.job import DetectConfig, JobSpec, RestartConfig
from perdure.model.paths import JobPaths
from perdure.model.report import RankRow
from perdure.service.commands import ask_controller
from perdure.service.jobfiles import (
    load_endpoint,
    load_parts,
    load_snapshot,
    paths_of,
    write_document,
)
from perdure.service.placement import Placement
from perdure.service.processes import find_by_title, list_living_descendants

_WAIT = (
    "import fcntl, os, sys; place = open(sys.argv[1]); fcntl.flock(place, fcntl.LOCK_SH); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""The lock goes with the descriptor, which does not outlive the exec."""


class Gates:
    """Which places have a machine; all have one at first."""

    def __init__(self, folder: Path, count: int) -> None:
        """Make a file for each of `count` places in `folder`."""
        self._folder = folder
        self._held: dict[int, int] = {}
        for place in range(count):
            (folder / f"place{place}").touch()

    def placement(self) -> Placement:
        """Return what has a node's agent wait for its place."""
        path = str(self._folder / "place{node}")
        return Placement(command=(sys.executable, "-I", "-S", "-c", _WAIT, path))

    def shut(self, places: Sequence[int]) -> None:
        """Let nobody start there. Who has started is not stopped."""
        for place in places:
            if place not in self._held:
                fd = os.open(self._folder / f"place{place}", os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX)
                self._held[place] = fd

    def open(self, places: Sequence[int]) -> None:
        """Let the nodes start."""
        for place in places:
            if place in self._held:
                os.close(self._held.pop(place))


def kill_nodes(job: str, home: str, places: Sequence[int]) -> int:
    """Kill all that these nodes have, agents first; return how many processes that were."""
    parts = load_parts(paths_of(home, job))
    agents = [parts.agents[place] for place in places if parts and place in parts.agents]
    keepers = [pid for place in places for pid in find_by_title(f"perdure keeper {job} {place}")]
    ranks = [pid for root in (*agents, *keepers) for pid in list_living_descendants(root)]
    # An agent would tell of its keeper.
    return _kill(dict.fromkeys((*agents, *keepers, *ranks)))


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants."""
    _kill((pid, *list_living_descendants(pid)))


def _kill(pids: Iterable[int]) -> int:
    """Kill processes in this order; return how many were there."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


MICRO_BATCHES = 56
"""Of a step: of 1 to 8 nodes, each more makes it shorter (56, 28, 19, 14, 12, 10, 8, 7)."""
DOUBT_S = 1.0
"""A silent node is lost after this long where the world has broken: five heartbeats."""
_NAME = "perdure.lab.live.paced"


class Trail:
    """What ranks have noted in a folder, read as it grows."""

    def __init__(self, folder: Path) -> None:
        """Read all of it from the beginning; the folder is made."""
        folder.mkdir(exist_ok=True)
        self._folder, self._at = folder, dict[Path, int]()
        self.rows: list[MadeStep] = []

    def poll(self) -> list[MadeStep]:
        """Return all rows, by time."""
        for path in sorted(self._folder.glob("made-*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._at.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at[path] = self._at.get(path, 0) + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ProtocolError):  # Cut off by a kill, another's behind it.
                    self.rows.append(decode(line, MadeStep))
        self.rows.sort(key=lambda row: row.at_s)
        return self.rows


_STEPS_A_LOOK = 5_000
"""A script that counts on by more between two looks has not made so many: it counts otherwise."""


class StatusTrail:
    """The steps of a job that notes none itself, as its status tells them twice a second.

    The steps between two looks are spread evenly over the time between.
    """

    def __init__(self, paths: JobPaths) -> None:
        """Read nothing yet."""
        self._paths = paths
        self._known: tuple[float, int] | None = None
        self.rows: list[MadeStep] = []

    def poll(self) -> list[MadeStep]:
        """Return all steps that were made, one sample each, by time."""
        now = load_snapshot(self._paths)
        if now is None or now.step < 0:
            return self.rows
        at_s = now.at_s - load_endpoint(self._paths).clock_offset_s
        before_s, before = self._known or (at_s, now.step)
        if not 0 < now.step - before <= _STEPS_A_LOOK:
            # Where it went back, what it makes from here on it makes again.
            self._known = (at_s, now.step)
            return self.rows
        nodes = {row.node for row in now.ranks if row.step >= now.step and _trains(row)}
        places = tuple(sorted(nodes)) or (self.rows[-1].places if self.rows else (0,))
        for number, step in enumerate(range(before + 1, now.step + 1), 1):
            made_s = before_s + (at_s - before_s) * number / (now.step - before)
            self.rows.append(MadeStep(made_s, step, 1, places))
        self._known = (at_s, now.step)
        return self.rows


def _trains(row: RankRow) -> bool:
    return row.state not in ("exited", "failed", "starting")


class System(Protocol):
    """One way to train while places are filled and emptied."""

    trail: Trail | StatusTrail

    def start(self, places: Sequence[int]) -> None:
        """Begin with machines in these places."""

    def warn(self, places: Sequence[int], notice_s: float) -> None:
        """Tell the system that these places will be gone after so many seconds; some ignore it."""
        return None

    def kill(self, places: Sequence[int]) -> None:
        """These are gone."""

    def add(self, places: Sequence[int]) -> None:
        """Tell the system that these places have a machine from now on."""

    def check(self) -> None:
        """Raise PlatformError where it does not run any more, and nobody starts it again."""
        return None

    def over(self) -> bool:
        """Return whether there is nothing left to play against, which is no fault."""
        return False

    def end(self) -> None:
        """Leave nothing behind."""


def make_paced_spec(job: str, folder: Path, count: int, pace_s: float, stages: int = 1) -> JobSpec:
    """Return the job of `perdure.lab.live.paced`, each copy of its model in so many stages."""
    words = ("elastic", folder, MICRO_BATCHES, pace_s, count, *([stages] if stages > 1 else []))
    return JobSpec(
        name=job,
        script=_NAME,
        module=True,
        args=tuple(map(str, words)),
        nodes=count,
        cwd=str(folder),
        tee="none",
        detect=DetectConfig(node_doubt_s=DOUBT_S),
        restart=RestartConfig(window_max=1_000_000, max_restarts=5),
    )


class Perdure:
    """A job under `perdure run --nodes`: a keeper, an agent and ranks for each place."""

    stop_s = 4.0
    """How long each of three signals to end has; then it is killed."""

    def __init__(
        self, spec: JobSpec, folder: Path, home: str, trail: "Trail | StatusTrail"
    ) -> None:
        """Play `spec`, whose nodes are the places; `trail` tells what it has made."""
        self.trail, self._folder, self._home, self._spec = trail, folder, home, spec
        self._count, self.job = spec.first_nodes, spec.name
        self.paths = paths_of(home, self.job)
        self._gates = Gates(folder, self._count)
        self._gone: set[int] = set()
        """Places that were drained, which have to be restored."""
        self._told: set[int] = set()
        """Places whose leaving was announced."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, places: Sequence[int]) -> None:
        """Begin with all places; those that are none of `places` are drained once it trains.

        A job that runs already is only brought to these places.
        """
        if self._process is None:
            self.launch()
            self.wait_world(range(self._count), 180.0)
        self.shape(places)

    def launch(self) -> None:
        """Start the job, with all places."""
        placement = self._folder / "placement.json"
        write_document(str(placement), self._gates.placement())
        plan = render(self._spec, self._home, placement=str(placement))
        for path, content in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(content)
        self._process = _start(self._folder / "perdure.out", plan.command, plan.env, plan.cwd)

    def shape(self, places: Sequence[int], *, keep: bool = False) -> None:
        """Come to exactly these places, without a loss; `keep` what the others' nodes run."""
        out = [place for place in range(self._count) if place not in places]
        here = {*self.trail.poll()[-1].places}
        back = sorted(set(places) - here)
        if back:
            self.add(back)
        for place in (p for p in out if p in here):
            self._ask("drain", _name_targets([place]) | {"deadline_s": 60.0}, 60.0)
            self._gone.add(place)
        self.wait_world(places, 120.0)
        if not keep:
            self.kill(out)

    def wait_world(self, places: Sequence[int], timeout_s: float) -> None:
        """Wait for three steps in a row that exactly `places` have made."""
        wanted, deadline = tuple(places), time.monotonic() + timeout_s
        while True:
            rows = self.trail.poll()[-3:]
            if len(rows) == 3 and all(row.places == wanted for row in rows):
                return
            self.check()
            if time.monotonic() > deadline:
                at = rows[-1].places if rows else ()
                raise PlatformError(
                    f"nodes {wanted} do not train within {timeout_s:g} s, but {at}",
                    hint=f"perdure events {self.job}",
                )
            time.sleep(0.1)

    def warn(self, places: Sequence[int], notice_s: float) -> None:
        """Announce the end of these places, as a monitor of the platform would."""
        self._told |= set(places)
        self._notify("preemption", places, notice_s)

    def kill(self, places: Sequence[int]) -> None:
        """Kill all processes of these nodes, and let none start there."""
        self._gates.shut(places)
        kill_nodes(self.job, self._home, places)

    def add(self, places: Sequence[int]) -> None:
        """Let the nodes start; those that were drained have to be let back in.

        What was announced is over: a machine that comes into a place is another one, but its boot
        id, by which the controller would know, is that of this machine.
        """
        barred = [place for place in places if place in self._gone]
        self._gone -= set(places)
        self._gates.open(places)
        self._notify("preemption-withdrawn", [p for p in places if p in self._told])
        self._told -= set(places)
        if barred:
            self._aside([("restore", _name_targets(barred), 30.0)])

    def _notify(self, kind: str, places: Sequence[int], grace_s: float = 0.0) -> None:
        said = {"kind": kind, "source": "trace", "grace_s": grace_s}
        self._aside([("notify", said | {"node": place}, 5.0) for place in places])

    def _aside(self, asked: list[tuple[str, dict[str, object], float]]) -> None:
        """Ask the controller while the trace goes on, each thing once the one before is done."""

        def ask() -> None:
            for verb, args, deadline_s in asked:
                with contextlib.suppress(PerdureError):
                    self._ask(verb, args, deadline_s)

        threading.Thread(target=ask, daemon=True).start()

    def _ask(self, verb: str, args: dict[str, object], deadline_s: float) -> None:
        document = {"id": f"replay-{token_hex(6)}", "kind": verb, "args": args, "who": "replay"}
        command = msgspec.convert(document, Command)
        ask_controller(self.job, self.paths, command, timeout_s=deadline_s + 15.0)

    def check(self) -> None:
        """Raise where the job has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise PlatformError(
                f"job {self.job} ended in the middle of the replay",
                hint=f"perdure report {self.job}; {self._folder}/perdure.out",
            )

    def over(self) -> bool:
        """Return false: what is played does not end by itself."""
        return False

    def compute_offset_s(self) -> float:
        """Return job time less CLOCK_MONOTONIC."""
        return load_endpoint(self.paths).clock_offset_s

    def end(self) -> None:
        """Stop the job; by force if it takes long, since places without a machine do not answer."""
        process, self._process = self._process, None
        if process is None:
            return
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self.stop_s)
                return
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:  # Once more: it is not waited for.
                break
        kill_tree(process.pid)
        process.wait()


class Driven(Perdure):
    """A user's own job, whose steps its status tells, and which may end before the trace does."""

    stop_s = 60.0

    def __init__(self, spec: JobSpec, folder: Path, home: str, ending: Callable[[], None]) -> None:
        """Play `spec` in `folder`; `ending` is called before it is stopped, which takes time."""
        super().__init__(spec, folder, home, StatusTrail(paths_of(home, spec.name)))
        self._ending = ending

    def end(self) -> None:
        """Stop the job, with a checkpoint where it can make one."""
        if self._process is not None:
            self._ending()
        super().end()

    def check(self) -> None:
        """Raise nothing: whatever the job makes of the trace is the answer."""

    def goes_on(self) -> bool:
        """Return whether its world goes on without a lost node."""
        now = load_snapshot(self.paths)
        return now is not None and now.fixed == ""

    def over(self) -> bool:
        """Return whether the job has ended."""
        return self._process is not None and self._process.poll() is not None


def _start(
    out: Path, command: Sequence[str], env: Mapping[str, str], cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which writes to the end of `out`."""
    with open(out, "ab") as file:
        return subprocess.Popen(
            command,
            env=os.environ | env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _name_targets(places: Sequence[int]) -> dict[str, object]:
    return {"targets": [f"node:{place}" for place in places]}


class Torchrun(System):
    """DistributedDataParallel, ended and started again from its checkpoint at each change.

    The new torchrun is started at once, and nobody has to find out first: kinder than its own
    rendezvous, which waits for a time-out. A checkpoint every 10 s.
    """

    def __init__(self, folder: Path, pace_s: float) -> None:
        """Play in `folder`."""
        self.trail, self._folder, self._pace_s = Trail(folder), folder, pace_s
        self._places: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, places: Sequence[int]) -> None:
        """Begin."""
        self._places = set(places)
        self._launch()

    def kill(self, places: Sequence[int]) -> None:
        """End all of it, and start it without them."""
        self._places -= set(places)
        self._launch()

    def add(self, places: Sequence[int]) -> None:
        """Start torchrun anew, with these places as well."""
        self._places |= set(places)
        self._launch()

    def choose(self, places: Sequence[int]) -> tuple[str, Sequence[int], tuple[str, ...]]:
        """Return what to train in which of `places`: a mode of `paced`, and its last arguments."""
        return "ddp", places, ()

    def _launch(self) -> None:
        self.end()
        mode, places, more = self.choose(sorted(self._places))
        if not places:
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={len(places)}", "--max-restarts=1000000", "-m", _NAME]
        command += [mode, str(self._folder), str(MICRO_BATCHES), str(self._pace_s)]
        command += [",".join(map(str, places)), *more]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = _start(self._folder / "torchrun.out", command, env)

    def end(self) -> None:
        """Kill it, with its ranks."""
        if self._process is not None:
            kill_tree(self._process.pid)
            self._process.wait()
            self._process = None


def choose_grid(nodes: int, stages: int, blocks: int = 8) -> tuple[int, int]:
    """Return the copies and stages that are fastest on so many nodes; (0, 0) where none fit.

    A copy needs `stages` stages at least. A step takes, of the copy with most micro-batches and in
    its largest stage, `micro-batches + stages - 1` passes (1F1B, Narayanan et al. 2021). Of equals
    the one with fewest nodes is taken.
    """

    def compute_passes(shape: tuple[int, int]) -> tuple[int, int]:
        copies, deep = shape
        return (-(-MICRO_BATCHES // copies) + deep - 1) * -(-blocks // deep), copies * deep

    shapes = [(nodes // deep, deep) for deep in range(stages, min(nodes, blocks) + 1)]
    return min(shapes, key=compute_passes, default=(0, 0))


class Morphing(Torchrun):
    """Varuna's way: at each change all is ended and launched again, in another D x P.

    Torch's own pipelining. Checkpoints every 10 s, and when a notice comes; nodes that fit into no
    grid are idle. As with `Torchrun`, nobody has to find out first.
    """

    def __init__(self, folder: Path, pace_s: float, stages: int) -> None:
        """Play in `folder`, each copy of the model in so many stages at least."""
        super().__init__(folder, pace_s)
        self._stages = stages

    def warn(self, places: Sequence[int], notice_s: float) -> None:
        """Have it save."""
        (self._folder / "notice").touch()

    def choose(self, places: Sequence[int]) -> tuple[str, Sequence[int], tuple[str, ...]]:
        """Return the fastest grid."""
        copies, deep = choose_grid(len(places), self._stages)
        return "pipeline", places[: copies * deep], (str(deep),)


class TorchftTimes(NamedTuple):
    """The time-outs of torchft: they decide what a loss costs it."""

    heartbeat_s: float
    """A silent group is out of the next quorum."""
    tick_s: float
    """The lighthouse looks this often."""
    collective_s: float
    """Of its managers and process groups, who wait for a dead one as long."""


DEFAULT_TIMES = TorchftTimes(heartbeat_s=5.0, tick_s=0.1, collective_s=60.0)
"""torchft 0.2.0's own."""


def tune_times(pace_s: float) -> TorchftTimes:
    """Return times as short as a user may choose them who knows this job.

    A collective waits for as long as the slowest group may be late: a lone group's whole step,
    and twice that, for it may be restarted beside the others on this machine.
    """
    return TorchftTimes(heartbeat_s=0.5, tick_s=0.01, collective_s=2 * MICRO_BATCHES * pace_s)


class Torchft(System):
    """A replica group of torchft in each place, under torchft's own lighthouse.

    Each group has its own share of every step: where one is missing, the batch is smaller.
    """

    def __init__(
        self, folder: Path, count: int, pace_s: float, times: TorchftTimes | None = None
    ) -> None:
        """Play in `folder`, with up to `count` groups; `times` are tuned where none are given."""
        self._times = times or tune_times(pace_s)
        self.trail, self._folder = Trail(folder), folder
        self._count, self._pace_s = count, pace_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._port = pick_free_port("127.0.0.1")

    def start(self, places: Sequence[int]) -> None:
        """Begin with a lighthouse (-1) and these groups."""
        program = Path(sys.executable).parent / "torchft_lighthouse"
        if not program.exists():
            raise PlatformError("torchft is not installed", hint="pip install torchft")
        words = ["--bind", f"127.0.0.1:{self._port}", "--min_replicas", "1"]
        words += ["--heartbeat_timeout_ms", f"{1000 * self._times.heartbeat_s:.0f}"]
        words += ["--quorum_tick_ms", f"{1000 * self._times.tick_s:.0f}"]
        self._popen(-1, [str(program), *words], {})
        self.add(places)

    def kill(self, places: Sequence[int]) -> None:
        """Kill these groups."""
        for place in places:
            if place in self._processes:
                process = self._processes.pop(place)
                kill_tree(process.pid)
                process.wait()

    def add(self, places: Sequence[int]) -> None:
        """Start these groups."""
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run += ["--max-restarts=1000000", "--nproc-per-node=1", "-m", _NAME, "torchft"]
        run += [str(self._folder), str(MICRO_BATCHES), str(self._pace_s), str(self._count)]
        run += [str(self._times.collective_s)]
        for place in places:
            env = {
                "REPLICA_GROUP_ID": str(place),
                "NUM_REPLICA_GROUPS": str(self._count),
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            }
            self._popen(place, run, env)

    def _popen(self, place: int, command: Sequence[str], env: dict[str, str]) -> None:
        env = {"RUST_LOG": "warn"} | env
        self._processes[place] = _start(self._folder / "torchft.out", command, env)

    def end(self) -> None:
        """Kill all groups, then the lighthouse."""
        self.kill(sorted(self._processes, reverse=True))
