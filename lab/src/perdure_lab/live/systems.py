"""What is played against a trace: perdure's elastic depth, torchrun with checkpoints, torchft.

Each trains `perdure_lab.live.paced`, notes its commits in the same form, and is told of the same
places: who has left is dead already, or (perdure) has been told of its leaving.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from perdure.adapters.host import pick_free_ports
from perdure.model.codec import decode
from perdure.model.errors import PerdureError, PlatformError, ProtocolError
from perdure.model.events import JournalEntry
from perdure.model.job import DetectConfig, JobSpec, RestartConfig
from perdure.model.report import RankRow, Snapshot
from perdure_lab.live.fleets.fleet import Fleet
from perdure_lab.live.fleets.local import LocalFleet, kill_tree, start_process
from perdure_lab.report import MadeStep

MICRO_BATCHES = 56
"""Of a step: of 1 to 8 nodes, each more makes it shorter (56, 28, 19, 14, 12, 10, 8, 7)."""
DOUBT_S = 1.0
"""A silent node is lost after this long where the world has broken: five heartbeats."""
_NAME = "perdure_lab.live.paced"


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

    def __init__(
        self, read: Callable[[], Snapshot | None], compute_offset_s: Callable[[], float]
    ) -> None:
        """Read nothing yet; by the second one job time is made CLOCK_MONOTONIC."""
        self._read, self._compute_offset_s = read, compute_offset_s
        self._known: tuple[float, int] | None = None
        self.rows: list[MadeStep] = []

    def poll(self) -> list[MadeStep]:
        """Return all steps that were made, one sample each, by time."""
        now = self._read()
        if now is None or now.step < 0:
            return self.rows
        at_s = now.at_s - self._compute_offset_s()
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

    def read_told(self) -> tuple[list[JournalEntry], float]:
        """Return the job's own journal, and job time less CLOCK_MONOTONIC; some have none."""
        return [], 0.0

    def end(self) -> None:
        """Leave nothing behind."""


def make_paced_spec(job: str, folder: Path, count: int, pace_s: float, stages: int = 1) -> JobSpec:
    """Return the job of `perdure_lab.live.paced`, each copy of its model in so many stages."""
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


class Perdure(System):
    """A job under `perdure run --nodes`, whose nodes are the places."""

    def __init__(self, spec: JobSpec, folder: Path, home: str, trail: Trail) -> None:
        """Play `spec`; `trail` tells what it has made."""
        self.trail, self._folder = trail, folder
        self._count, self.job = spec.first_nodes, spec.name
        self._fleet = LocalFleet(spec, home, folder, stop_s=4.0)
        self._gone: set[int] = set()
        """Places that were drained, which have to be restored."""

    def start(self, places: Sequence[int]) -> None:
        """Begin with all places; those that are none of `places` are drained once it trains.

        A job that runs already is only brought to these places.
        """
        if self._fleet.process is None:
            self._fleet.start()
            self.wait_world(range(self._count), 180.0)
        self.shape(places)

    def shape(self, places: Sequence[int], *, keep: bool = False) -> None:
        """Come to exactly these places, without a loss; `keep` what the others' nodes run."""
        out = [place for place in range(self._count) if place not in places]
        here = {*self.trail.poll()[-1].places}
        back = sorted(set(places) - here)
        if back:
            self.add(back)
        for place in (p for p in out if p in here):
            self._fleet.ask("drain", _name_targets([place]) | {"deadline_s": 60.0}, 60.0)
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
        """Announce the end of these places."""
        self._fleet.warn(places, notice_s)

    def kill(self, places: Sequence[int]) -> None:
        """Take these nodes away."""
        self._fleet.take(places)

    def add(self, places: Sequence[int]) -> None:
        """Give the nodes back; those that were drained have to be let back in."""
        barred = [place for place in places if place in self._gone]
        self._gone -= set(places)
        self._fleet.give(places)
        if barred:
            self._fleet.ask_aside([("restore", _name_targets(barred), 30.0)])

    def check(self) -> None:
        """Raise where the job has ended."""
        if self._fleet.over():
            raise PlatformError(
                f"job {self.job} ended in the middle of the replay",
                hint=f"perdure report {self.job}; {self._folder}/perdure.out",
            )

    def read_told(self) -> tuple[list[JournalEntry], float]:
        """Return its journal, and job time less CLOCK_MONOTONIC."""
        return self._fleet.read_entries(), self._fleet.compute_offset_s()

    def end(self) -> None:
        """Stop the job; by force if it takes long."""
        self._fleet.end()


class Driven(System):
    """A user's own job, wherever its nodes are; it may end before the trace does."""

    def __init__(self, fleet: Fleet, *, stop: bool, ending: Callable[[], None]) -> None:
        """Play the job of `fleet`; at the end it is stopped, or goes on with all nodes.

        Either may take a while: `ending` is called before.
        """
        self.fleet, self.job = fleet, fleet.spec.name
        self._stop, self._ended, self._ending = stop, False, ending
        self.trouble: PerdureError | None = None
        """Why the play cannot go on; what was played until then is told."""
        self.trail = StatusTrail(fleet.read_snapshot, fleet.compute_offset_s)
        self._told: tuple[list[JournalEntry], float] | None = None

    def start(self, places: Sequence[int]) -> None:
        """Have it run with all nodes; who is not there at first is taken once it was timed."""
        self.fleet.start()

    def warn(self, places: Sequence[int], notice_s: float) -> None:
        """Announce the end of these nodes."""
        self.fleet.warn(places, notice_s)

    def kill(self, places: Sequence[int]) -> None:
        """Take these nodes away."""
        try:
            self.fleet.take(places)
        except PlatformError as error:
            self.trouble = error

    def add(self, places: Sequence[int]) -> None:
        """Give these nodes back."""
        try:
            self.fleet.give(places)
        except PlatformError as error:
            self.trouble = error

    def goes_on(self) -> bool:
        """Return whether its world goes on without a lost node."""
        now = self.fleet.read_snapshot()
        return now is not None and now.fixed == ""

    def over(self) -> bool:
        """Return whether the job has ended, or its nodes cannot be moved any more."""
        self.trouble = self.trouble or self.fleet.find_trouble()
        return self.trouble is not None or self.fleet.over()

    def read_told(self) -> tuple[list[JournalEntry], float]:
        """Return its journal, and job time less CLOCK_MONOTONIC, as they were at the end."""
        if self._told is None:
            entries: list[JournalEntry] = []
            try:
                entries = self.fleet.read_entries()
            except PerdureError as error:  # What was seen of its steps is told all the same.
                self.trouble = self.trouble or error
            self._told = entries, self.fleet.compute_offset_s()
        return self._told

    def end(self) -> None:
        """Stop the job, or leave it with all its nodes; whatever it made of the trace is told."""
        if not self._ended:
            self._ended = True
            try:
                self._ending()
            finally:
                self.fleet.end(stop=self._stop)


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

    def choose(self, places: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """Return in which of `places` to train, and what torchrun is to start there."""
        return places, self._call_paced("ddp", places)

    def _call_paced(self, mode: str, places: Sequence[int], *more: object) -> list[str]:
        words = (mode, self._folder, MICRO_BATCHES, self._pace_s, ",".join(map(str, places)), *more)
        return ["-m", _NAME, *map(str, words)]

    def _launch(self) -> None:
        self.end()
        places, words = self.choose(sorted(self._places))
        if not places:
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={len(places)}", "--max-restarts=1000000", *words]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = start_process(self._folder / "torchrun.out", command, env)

    def end(self) -> None:
        """Kill it, with its ranks."""
        if self._process is not None:
            kill_tree(self._process.pid)
            self._process.wait()
            self._process = None


def choose_grid(
    nodes: int, stages: int, blocks: int = 8, micro_batches: int = MICRO_BATCHES
) -> tuple[int, int]:
    """Return the copies and stages that are fastest on so many nodes; (0, 0) where none fit.

    A copy needs `stages` stages at least. A step takes, of the copy with most micro-batches and in
    its largest stage, `micro-batches + stages - 1` passes (1F1B, Narayanan et al. 2021). Of equals
    the one with fewest nodes is taken.
    """

    def compute_passes(shape: tuple[int, int]) -> tuple[int, int]:
        copies, deep = shape
        return (-(-micro_batches // copies) + deep - 1) * -(-blocks // deep), copies * deep

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

    def choose(self, places: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """Return the places of the fastest grid."""
        copies, deep = choose_grid(len(places), self._stages)
        used = places[: copies * deep]
        return used, self._call_paced("pipeline", used, deep)


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
        [self._port] = pick_free_ports("127.0.0.1", 1)

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
        self._processes[place] = start_process(self._folder / "torchft.out", command, env)

    def end(self) -> None:
        """Kill all groups, then the lighthouse."""
        self.kill(sorted(self._processes, reverse=True))
