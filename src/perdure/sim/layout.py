"""How a simulated training is cut, what goes wrong in it, and what is beside it in health."""

from dataclasses import dataclass
from typing import Literal

NEVER = float("inf")

FaultKind = Literal[
    "stop", "spin", "sleep", "drop-link", "drop-nic", "slow-link", "slow-nic", "loss",
    "slow-data", "slow-forward", "slow-backward", "slow-optimizer", "slow-host",
    "other-bytes", "other-op", "node",
]  # fmt: skip
HANGS = ("stop", "spin", "sleep")
Silence = Literal["evaluate", "save", "storage", "disk", "download", "preprocess"]
"""What a rank does alone, without a sign: rank 0 evaluates on its device, or saves, and moves
neither CPU nor I/O; a rank waits for storage in state S, or in state D; it downloads (I/O moves);
it preprocesses (CPU moves)."""
STAGES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the world is cut: ranks are numbered tensor, context, data, pipeline."""

    data: int = 2
    tensor: int = 1
    pipeline: int = 1
    nproc: int = 1
    """Ranks a node."""
    context: int = 1

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.width * self.pipeline

    @property
    def width(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.data * self.context * self.tensor

    @property
    def nodes(self) -> int:
        """Nodes."""
        return self.size // self.nproc

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.nproc


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault."""

    kind: FaultKind
    at_s: float
    rank: int = 0
    peer: int = 0
    """The other end of a link."""
    factor: float = 1.0
    """Of the stage's or the link's time."""
    until_s: float = NEVER


@dataclass(slots=True)
class Noise:
    """The noise that healthy training has beside it."""

    jitter: float = 0.03
    hog_every_s: float = 0.0
    """A neighbour's burst on one node, so often; up to 1.3 s, up to 1.6 times."""
    gc_every_s: float = 0.0
    checkpoint_every_s: float = 0.0
    evaluate_steps: int = 0
    """Rank 0 evaluates alone every so many steps."""
    resize_every_s: float = 0.0
    """The batch of all ranks changes."""
    rebuild_step: int = -1
    """The data-parallel buckets are cut otherwise from this step on."""
    silences: tuple[Silence, ...] = ()
    """What a rank does alone now and then, each equally often..."""
    silent_every_s: float = 0.0
    """... so often..."""
    silent_s: tuple[float, float] = (2.0, 400.0)
    """... for so long: shortest and longest."""
    compile_s: float = 0.0
    """The first step takes each rank up to so much longer, with its CPU at work."""
