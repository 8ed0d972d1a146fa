"""Worlds as the planner predicts them, in a table by shape: what oracles and policies choose from.

A `Shape` is how many replicas and stages there are; a `World` says also who has which blocks, in
which micro-batches. Of all worlds of a shape the table has the fastest. Worlds whose stages differ
in their number of copies have no shape, and are left out.
"""

from perdure.lab.policies.throughput import Shape, Throughput
from perdure.model.errors import ConfigError
from perdure.model.planning.costs import CostProfile
from perdure.model.planning.world import World, make_devices
from perdure.plan.worlds.planner import Request, plan_worlds


def shape_of(world: World) -> Shape | None:
    """Return the shape of `world`; None where its stages differ in their number of copies."""
    even = len({len(stage.devices) for stage in world.stages}) == 1
    return Shape(world.replicas, world.ranks) if even else None


def tabulate(
    profile: CostProfile, nodes_max: int, memory_bytes: int, global_batch: int
) -> Throughput:
    """Return what each shape on up to `nodes_max` nodes of one device would do.

    Raises:
        ConfigError: None fits.
        MeasureError: The profile lacks a measure.
    """
    rates: dict[Shape, float] = {}
    for stages in range(1, min(nodes_max, len(profile.blocks)) + 1):
        for replicas in range(1, nodes_max // stages + 1):
            request = Request(
                global_batch, ranks=(stages,), schedules=("1f1b", "interleaved"), options=1
            )
            devices = make_devices(replicas * stages, 1, memory_bytes)
            for option in plan_worlds(profile, devices, request).options:
                shape = shape_of(option.world)
                if shape is not None:
                    rates[shape] = max(option.samples_per_s, rates.get(shape, 0.0))
    if not rates:
        raise ConfigError(
            f"no world fits up to {nodes_max} nodes of {memory_bytes / 1e9:g} GB",
            hint="perdure plan says why",
        )
    return Throughput(
        "planned",
        rates,
        global_batch=global_batch,
        state_bytes=sum(block.state_bytes for block in profile.blocks),
        source=f"planner, profile {profile.fingerprint}",
    )
