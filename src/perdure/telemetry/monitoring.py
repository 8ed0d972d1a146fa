"""What monitoring systems are given: a Snapshot as metrics.

One figure a rank is what a job of hundreds of ranks can afford; beyond `ranks_max` the ranks are
counted by state and told of by node, since a scrape of 10,000 ranks would cost more than it says.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from perdure.model.report import UNFAILED, DeviceRow, RankRow, Snapshot

RANKS_MAX = 512
STATES = (
    "pending", "forming", "running", "paused", "recovering", "stopping", "done", "failed",
    "stopped", "lost",
)  # fmt: skip
RANK_STATES = ("starting", "running", "waiting", "suspected", "exited", "failed")


class Metric(NamedTuple):
    """One metric; every sample has the same labels, in the order of `labels`."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]


def list_metrics(snapshot: Snapshot, ranks_max: int = RANKS_MAX) -> list[Metric]:
    """Return the metrics of `snapshot`, those of the job first."""
    job, newest = snapshot.job, snapshot.checkpoints[-1] if snapshot.checkpoints else {}
    saved = {name: float(v) for name, v in newest.items() if isinstance(v, int | float)}

    def one(
        name: str, help: str, value: float, kind: Literal["gauge", "counter"] = "gauge"
    ) -> Metric:
        return Metric(f"perdure_{name}", kind, help, ("job",), [((job,), value)])

    def many(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        samples = [((job, key), value) for key, value in values.items()]
        return Metric(f"perdure_{name}", "gauge", help, ("job", label), samples)

    over = [
        row.total_s for row in snapshot.recent
        if row.total_s is not None and row.rung not in UNFAILED
    ]  # fmt: skip
    ranks = Counter(row.state for row in snapshot.ranks)
    numbers = {k: float(v) for k, v in snapshot.settings.items() if isinstance(v, int | float)}
    open_kinds = Counter(
        v.kind for v in snapshot.verdicts
        if v.generation == snapshot.generation and "withdrawn" not in v.evidence
    )  # fmt: skip
    of_checkpoints = [
        one("checkpoint_step", "Step of the newest checkpoint.", saved.get("step", -1.0)),
        one("checkpoint_stall_seconds", "Stall for it.", saved.get("stall_s", -1.0)),
        one("checkpoint_save_seconds", "From its snapshot on.", saved.get("save_s", -1.0)),
        one("checkpoint_time_seconds", "When it was saved.", saved.get("at_s", -1.0)),
    ]
    return [
        many("job_state", "1 for the state that the job is in.", "state",
             {state: float(snapshot.state == state) for state in STATES}),
        one("step", "Steps committed by every rank; -1 where unknown.", snapshot.step),
        one("steps_per_second", "Speed of the slowest rank.", snapshot.steps_per_s),
        one("generation", "Generation of the world.", snapshot.generation),
        one("world_size", "Ranks of the job.", snapshot.world_size),
        one("restarts_total", "Times that the world was formed again.", snapshot.restarts,
            "counter"),
        one("incidents_total", "Incidents so far.", snapshot.incidents, "counter"),
        one("paused", "1 while an operator has it stand still.", float(snapshot.paused)),
        one("settings_epoch", "The change of live configuration in force.", snapshot.epoch),
        one("snapshot_time_seconds", "Job time of these figures.", snapshot.at_s),
        *(of_checkpoints if newest else ()),
        *(one("last_recovery_seconds", "From the last failure to the first new step.", total_s)
          for total_s in over[-1:]),
        many("ranks", "Ranks by state.", "state", {s: float(ranks[s]) for s in RANK_STATES}),
        many("metric", "Last value of `run.log`.", "name", dict(sorted(snapshot.metrics.items()))),
        many("setting", "Live configuration in force.", "key", dict(sorted(numbers.items()))),
        many("verdicts_open", "Verdicts on this generation.", "kind",
             {kind: float(count) for kind, count in sorted(open_kinds.items())}),
        *_list_rank_metrics(snapshot, ranks_max),
        *_list_replica_metrics(snapshot),
        *_list_device_metrics(snapshot),
    ]  # fmt: skip


def _list_rank_metrics(snapshot: Snapshot, ranks_max: int) -> list[Metric]:
    job, rows, node_of = snapshot.job, snapshot.ranks, attrgetter("node")
    groups: list[tuple[tuple[str, ...], list[RankRow]]]
    if len(rows) <= ranks_max:
        labels: tuple[str, ...] = ("job", "rank", "node")
        groups = [((job, str(r.rank), str(r.node)), [r]) for r in rows]
    else:
        labels = ("job", "node")
        by_node = groupby(sorted(rows, key=node_of), node_of)
        groups = [((job, str(node)), list(mine)) for node, mine in by_node]
    scope = labels[1]
    return [
        Metric(f"perdure_{scope}_step", "gauge", "Its steps; of a node, of its last rank.", labels,
               [(key, min(r.step for r in group)) for key, group in groups]),
        Metric(f"perdure_{scope}_steps_per_second", "gauge", "Its speed.", labels,
               [(key, min(r.steps_per_s for r in group)) for key, group in groups]),
        Metric(f"perdure_{scope}_cpu_seconds_total", "counter", "CPU time used.", labels,
               [(key, sum(r.cpu_s for r in group)) for key, group in groups]),
        Metric(f"perdure_{scope}_resident_bytes", "gauge", "Resident memory.", labels,
               [(key, sum(r.rss_bytes for r in group)) for key, group in groups]),
    ]  # fmt: skip


def _list_replica_metrics(snapshot: Snapshot) -> list[Metric]:
    keys, labels = [(snapshot.job, str(r.group)) for r in snapshot.replicas], ("job", "group")
    training = [float(row.state == "training") for row in snapshot.replicas]
    steps = [float(row.step) for row in snapshot.replicas]
    found = [
        Metric("perdure_replica_training", "gauge", "1 while the replica group trains.", labels,
               list(zip(keys, training, strict=True))),
        Metric("perdure_replica_step", "gauge", "Its step.", labels,
               list(zip(keys, steps, strict=True))),
    ]  # fmt: skip
    return found if keys else []


def _list_device_metrics(snapshot: Snapshot) -> list[Metric]:
    """Only devices with counters, and those that somebody has reported."""
    labels = ("job", "node", "device")

    def key(row: DeviceRow) -> tuple[str, ...]:
        return (snapshot.job, str(row.node), row.device)

    told = [row for row in snapshot.devices if row.health]
    found = [
        Metric("perdure_device_healthy", "gauge", "0 where a device has failed.", labels,
               [(key(row), float(row.health != "failed")) for row in told]),
    ]  # fmt: skip
    looks = [(key(row), row.sample) for row in told if row.sample is not None]
    for name, field, help in (
        ("sm_clock_mhz", "sm_clock_mhz", "Clock of its processors."),
        ("power_watts", "power_w", "Power that it draws."),
        ("temperature_celsius", "temperature_c", "Temperature."),
        ("memory_bytes", "memory_bytes", "Memory in use."),
        ("ecc_uncorrected", "ecc_uncorrected", "Uncorrectable memory errors."),
        ("remapped_rows", "remapped_rows", "Memory rows remapped after such errors."),
        ("throttle_reasons", "throttle", "Bits, as NVML numbers them."),
    ):
        samples = [(where, float(getattr(look, field))) for where, look in looks]
        known = [(where, value) for where, value in samples if value >= 0]
        found.append(Metric(f"perdure_device_{name}", "gauge", help, labels, known))
    return [metric for metric in found if metric.samples]
