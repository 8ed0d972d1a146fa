"""The planner: within memory, never slower with more devices, the best that there is."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.examples import examples
from tests.profiles import GB, MB, make_profile

from perdure.model.errors import ConfigError, MeasureError
from perdure.model.planning.costs import CostProfile, Shared
from perdure.model.planning.world import World, make_devices
from perdure.plan.pipeline.simulate import simulate
from perdure.plan.worlds.planner import (
    Option,
    Request,
    compute_missing_bytes,
    decide_change,
    plan_worlds,
)
from perdure.plan.worlds.score import Scorer

ALL = ("1f1b", "interleaved", "rerouted", "zero-bubble")


@st.composite
def profiles(draw: st.DrawFn) -> CostProfile:
    blocks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    profile = make_profile(
        [n * 1e-3 for n in blocks], (1, 2), state=draw(st.integers(10, 400)) * MB,
        stored=draw(st.integers(10, 100)) * MB, inputs=draw(st.integers(1, 10)) * MB, weight=1.0,
    )  # fmt: skip
    tied = draw(st.sets(st.integers(0, len(blocks) - 1), max_size=3))
    return share(profile, sorted(tied)) if len(tied) > 1 else profile


def share(profile: CostProfile, blocks: Sequence[int]) -> CostProfile:
    """Return it with half of the state of these blocks in common."""
    half = profile.blocks[0].gradient_bytes // 2
    return replace(profile, shared=(Shared(tuple(blocks), half, half, half, 0.0),))


def recount(world: World, scorer: Scorer) -> int:
    """Return the most bytes on a device, from the blocks, action by action."""
    orders, _, names = scorer.lay_out(world)
    blocks, most = scorer.profile.blocks, 0
    for cell in range(len(orders)):
        parts = {s: p for s, p in enumerate(world.stages) if names[cell] in p.devices}
        mine = {i for p in parts.values() for i in range(p.first, p.stop)}
        state = sum(blocks[i].state_bytes for i in mine)
        for one in scorer.profile.shared:
            state -= one.state_bytes * max(0, len(mine & set(one.blocks)) - 1)
        held: dict[int, int] = {}
        for action in orders[cell]:
            part = parts[action.stage]
            costs = [blocks[i].costs[world.micro_batch] for i in range(part.first, part.stop)]
            if action.kind == "F":
                held[action.stage] = held.get(action.stage, 0) + 1
            if part.recompute:
                beside = max(c.stored_bytes for c in costs) if action.kind == "B" else 0
            else:
                beside = 0
            kept = 0
            for stage, number in held.items():
                p = parts[stage]
                for i in range(p.first, p.stop):
                    cost = blocks[i].costs[world.micro_batch]
                    kept += number * (cost.input_bytes if p.recompute else cost.stored_bytes)
            most = max(most, state + kept + beside)
            if action.kind == ("W" if world.schedule == "zero-bubble" else "B"):
                held[action.stage] -= 1
    return most


@settings(deadline=None, max_examples=examples(40))
@given(
    profiles(), st.integers(1, 9), st.integers(1, 3), st.integers(60, 2500), st.sampled_from(ALL)
)
def test_no_device_holds_more_than_it_has(
    profile: CostProfile, devices: int, per_node: int, memory: int, schedule: str
) -> None:
    there = make_devices(-(-devices // per_node), per_node, memory * MB)[:devices]
    request = Request(24, schedules=(schedule,))  # type: ignore[arg-type]
    plan = plan_worlds(profile, there, request)
    scorer = Scorer(profile, there)
    for option in plan.options:
        world = option.world
        assert recount(world, scorer) <= option.memory_bytes <= memory * MB
        assert len(set(world.devices)) == len(world.devices) == devices - option.idle
        assert [s.first for s in world.stages][1:] == [s.stop for s in world.stages][:-1]
        assert (world.stages[0].first, world.stages[-1].stop) == (0, len(profile.blocks))
        assert world.count * world.micro_batch == 24
    if not plan.options:
        assert plan.excluded or len(there) == 1 or schedule != "1f1b"


@settings(deadline=None, max_examples=25)
@given(profiles(), st.integers(200, 2500))
def test_more_devices_are_never_slower(profile: CostProfile, memory: int) -> None:
    before = None
    for devices in range(1, 9):
        there = make_devices(devices, 1, memory * MB)
        plan = plan_worlds(profile, there, Request(24, options=1))
        assert plan.options or before is None
        if plan.options:
            assert before is None or plan.options[0].step_s <= before * (1 + 1e-9)
            before = plan.options[0].step_s


@settings(deadline=None, max_examples=25)
@given(profiles(), st.integers(1, 8), st.integers(200, 2500))
def test_what_is_left_out_is_not_faster(profile: CostProfile, devices: int, memory: int) -> None:
    """The search that stops early finds what one that is asked for every family finds."""
    there = make_devices(devices, 1, memory * MB)
    few = plan_worlds(profile, there, Request(24, options=1)).options
    every = plan_worlds(profile, there, Request(24, options=1000))
    assert every.slower == 0
    assert [o.step_s for o in few] == pytest.approx([o.step_s for o in every.options[:1]])


@settings(deadline=None, max_examples=25)
@given(profiles(), st.integers(1, 8), st.lists(st.sampled_from([1.0, 1.5, 3.0]), max_size=3))
def test_scores_are_those_of_the_whole_world(
    profile: CostProfile, devices: int, slow: list[float]
) -> None:
    """Replicas that are alike are simulated once."""
    names = [(f"n{i}/0", factor) for i, factor in enumerate(slow)]
    there = make_devices(devices, 1, 100 * GB, slow=names)
    scorer = Scorer(profile, there)
    for option in plan_worlds(profile, there, Request(120, micro_batches=(1,))).options:
        orders, pipe, _ = scorer.lay_out(option.world)
        line = simulate(orders, pipe)
        assert option.step_s == pytest.approx(line.step_s)
        assert option.bubble == pytest.approx(line.bubble)


@settings(deadline=None, max_examples=10)
@given(profiles(), st.integers(2, 5))
def test_repetition_need_not_be_simulated(profile: CostProfile, devices: int) -> None:
    there = make_devices(devices, 1, 100 * GB)
    scorer = Scorer(profile, there)
    for option in plan_worlds(profile, there, Request(1500, micro_batches=(1,), options=3)).options:
        orders, pipe, _ = scorer.lay_out(option.world)
        assert option.step_s == pytest.approx(simulate(orders, pipe).step_s, rel=0.02)


def test_the_same_again() -> None:
    profile = make_profile([0.003, 0.001, 0.002, 0.004], (1, 2), state=200 * MB, stored=20 * MB)
    plans = [plan_worlds(profile, make_devices(3, 2, GB), Request(32)) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_remainder_is_used_where_it_pays() -> None:
    """Three blocks, the first twice as long, five micro-batches in flight: two copies of it."""
    profile = make_profile([0.2, 0.1, 0.1], state=GB)
    there = make_devices(4, 1, 3 * GB // 2)
    best = plan_worlds(profile, there, Request(64)).options[0]
    assert (best.world.shape, best.world.schedule, best.idle) == ("(2,1,1)", "rerouted", 0)
    only = plan_worlds(profile, there, Request(64, schedules=("1f1b",))).options[0]
    assert (only.world.shape, only.idle) == ("1x3", 1)
    assert best.step_s < 0.6 * only.step_s


def test_a_straggler_gets_less() -> None:
    profile = make_profile([0.01], state=MB)
    there = make_devices(3, 1, GB, slow=[("n1/0", 2.0)])
    plan = plan_worlds(profile, there, Request(25))
    assert plan.options[0].world.shares == (10, 5, 10)
    assert plan.notes == ("devices differ: those that are slow or small are left idle first",)


def test_recompute_only_where_memory_asks_for_it() -> None:
    profile = make_profile([0.01] * 4, state=100 * MB, stored=100 * MB, inputs=10 * MB)
    request = Request(16, ranks=(2,), schedules=("1f1b",))
    there = make_devices(2, 1, 450 * MB)
    world = plan_worlds(profile, there, request).options[0].world
    assert [stage.recompute for stage in world.stages] == [True, False]
    there = make_devices(2, 1, 650 * MB)
    world = plan_worlds(profile, there, request).options[0].world
    assert [stage.recompute for stage in world.stages] == [False, False]


def test_what_blocks_share_is_held_once_and_summed_over_the_stages_that_have_it() -> None:
    """Ends that share half of their state: one device saves it, two stages pay for its way."""
    plain = make_profile([1e-3] * 4, state=400 * MB)
    tied = share(plain, (0, 3))
    for devices, saved, link in ((1, 150, 0.0), (2, 0, 10e9)):
        there = make_devices(devices, 1, 10 * GB)
        request = Request(8, ranks=(devices,), schedules=("1f1b",), options=1)
        (before,), (after,) = (plan_worlds(p, there, request).options for p in (plain, tied))
        assert before.memory_bytes - after.memory_bytes == saved * MB
        wanted = 2e-4 + 50 * MB / link if link else 0.0
        assert after.step_s - before.step_s == pytest.approx(wanted)
        (note,) = plan_worlds(tied, there, request).notes
        assert note.startswith("blocks 0, 3 share parameters: 50.0 MB of gradients")


def test_what_cannot_be_says_why() -> None:
    profile = make_profile([0.01] * 2, (1, 3), state=GB)
    plan = plan_worlds(profile, make_devices(2, 1, GB // 2), Request(8))
    assert plan.options == ()
    found = {(entry.kind, entry.what): entry for entry in plan.excluded}
    assert found["batch", "micro-batch 3"].reason == "8 samples are no whole number of them"
    refused = found["memory", "micro-batch 1, 1f1b"]
    assert refused.ranks == (1, 2)
    assert refused.reason == "block b1 alone takes 1,000,000,000 bytes of 500,000,000"


def test_links_that_were_not_measured_exclude_worlds_that_need_them() -> None:
    profile = make_profile([0.01] * 2, links=False)
    plan = plan_worlds(profile, make_devices(2, 1, GB), Request(8))
    assert [option.world.shape for option in plan.options] == ["1x1"]
    reasons = {entry.reason for entry in plan.excluded if entry.kind == "measure"}
    assert reasons == {
        "no transfer across nodes in the cost profile",
        "no all-reduce over 2 devices across nodes in the cost profile",
    }


def test_requests_that_cannot_be_are_errors() -> None:
    profile = make_profile([0.01], (2, 4))
    with pytest.raises(MeasureError, match="micro-batches of 3 were not measured"):
        plan_worlds(profile, make_devices(1, 1, GB), Request(12, micro_batches=(3,)))
    with pytest.raises(ConfigError, match="batch 7 is not a whole number of micro-batches of 2 or"):
        plan_worlds(profile, make_devices(1, 1, GB), Request(7))


# --- changing the world --------------------------------------------------------------------------


def options(count: int) -> tuple[CostProfile, Option, Option]:
    profile = make_profile([0.01] * 4, state=400 * MB)
    request = Request(32, ranks=(2,), schedules=("1f1b",))
    small, large = (plan_worlds(profile, make_devices(n, 1, GB), request) for n in (2, count))
    return profile, small.options[0], large.options[0]


def test_only_what_a_device_lacks_is_moved() -> None:
    """Two of four devices have the same stages as before; parameters and optimizer are 3/4."""
    profile, small, large = options(4)
    assert small.world.stages[0].devices == ("n0/0",)
    missing = compute_missing_bytes(small.world, large.world, profile)
    held = {name: size for name, size in missing.items() if size}
    assert held == {"n2/0": 600 * MB, "n3/0": 600 * MB}
    assert not any(compute_missing_bytes(large.world, large.world, profile).values())


@pytest.mark.parametrize(
    ("dwell_s", "wanted"), [(1000.0, "change"), (25.0, "change"), (15.0, "stay")]
)
def test_a_change_must_pay_before_the_next(dwell_s: float, wanted: str) -> None:
    """Moving 600 MB at 60 MB/s takes 10 s; the gain is nearly twofold after them."""
    profile, small, large = options(4)
    change = decide_change(
        small.world, small.samples_per_s, large,
        profile=profile, bytes_per_s=60e6, fixed_s=0.0, dwell_s=dwell_s,
    )  # fmt: skip
    assert (change.decision, change.move_s) == (wanted, 10.0)
    assert f"{100 * change.gain:+.1f}%" in change.reason


def test_a_world_that_cannot_go_on_is_left() -> None:
    profile, small, large = options(4)
    change = decide_change(
        large.world, 0.0, small, profile=profile, bytes_per_s=1.0, fixed_s=9.0, dwell_s=1.0
    )
    assert change.decision == "change"
    assert change.move_s == 9.0
