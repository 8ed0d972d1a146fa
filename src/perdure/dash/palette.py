"""One colour, one word and one sentence for each account of the ledger, on every screen."""

import msgspec

from perdure.model.report import ACCOUNTS


class Ink(msgspec.Struct, frozen=True):
    """How an account looks and what it means."""

    color: str
    label: str
    meaning: str


INKS: dict[str, Ink] = {
    "useful": Ink("#2a9d6f", "useful", "steps that were kept"),
    "packing": Ink("#8d99ae", "packing", "ranks that fit no shape"),
    "reconfiguration.detect": Ink("#f4a259", "detect", "failure until somebody knew"),
    "reconfiguration.decide": Ink("#ee8434", "decide", "until the controller acted"),
    "reconfiguration.abort": Ink("#d1661c", "abort", "until no old process was left"),
    "reconfiguration.communicator": Ink(
        "#b388d9", "communicator", "start of processes, process group formed"
    ),
    "reconfiguration.state": Ink("#8e5fc2", "state", "checkpoint read"),
    "reconfiguration.warmup": Ink("#6a3d9a", "warm-up", "until the first new step"),
    "lost_work": Ink("#d1495b", "lost work", "steps that were not kept, and steps cut off"),
    "checkpoint": Ink("#3d7ea6", "checkpoint", "training stalled for a checkpoint"),
    "steady_overhead": Ink("#7fb7d6", "overhead", "perdure's own code in the training thread"),
    "startup": Ink("#c9a227", "start-up", "before the very first step"),
    "idle": Ink("#b8bcc4", "idle", "spares, and ranks that were done"),
    "unattributed": Ink("#ff3ea5", "unattributed", "what no stamp explains"),
}

assert tuple(INKS) == ACCOUNTS
