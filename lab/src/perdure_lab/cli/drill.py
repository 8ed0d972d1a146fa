"""`perdure drill --on`: a rehearsal of the user's own job on the boxes of a profile."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from perdure.adapters.confinement import ABI_MIN, ABI_TRUNCATE
from perdure.cli.drill import UNCONFINED, Request, Site, count_starts
from perdure.cli.platforms.launch import check_launch, make_launch_spec
from perdure.cli.platforms.profiles import choose_profile, here
from perdure.drill.isolation import check_drillable, isolate_elsewhere, list_changes
from perdure.drill.onbox import LEASE_S, Kept
from perdure.drill.planning import DrillWish, keep_first, plan_acts
from perdure.launch.ssh.check import measure_project
from perdure.model.errors import ConfigError, SafetyError
from perdure.model.platforms.launching import Plan
from perdure.model.platforms.profile import Profile
from perdure_lab.drill import boxes


def look_at_boxes(request: Request, on: str, host: str | None) -> Site:
    """Return a drill on the boxes of a profile, which are looked at; nothing is sent.

    Raises:
        ConfigError: job and profile do not go together, or it is a platform of another kind.
        SafetyError: something is amiss there that a launch would not survive.
        PlatformError: a box does not answer.
    """
    place = here()
    profile = choose_profile(on, host, place.home).profile
    _check_kind(profile)
    for path in request.writable:
        if not path.is_absolute():
            raise ConfigError(f"--writable {path}: not absolute", hint="a folder of the boxes")
    spec = make_launch_spec(request.job, place.home)
    if request.nodes is not None:
        spec = msgspec.structs.replace(spec, nodes=request.nodes)
    check_drillable(spec)
    acts, left_out = plan_acts(
        request.names, request.seed, spec.nodes, spec.nproc, python=not spec.no_python
    )
    acts, left_out = keep_first(acts, left_out, boxes.list_hosts(profile), spec.nodes)
    wish = DrillWish(
        spec, Path(spec.launch.project), place.home, acts, left_out, request.seed,
        request.budget_s, place.environ, [str(path) for path in request.writable],
        request.confined,
    )  # fmt: skip
    name = boxes.name_run(spec)
    plan = boxes.plan_run(spec, profile, name, Kept(confined=wish.confined))
    plan = check_launch(isolate_elsewhere(spec, name), plan, place)
    measured = msgspec.structs.replace(profile, shared_fs=plan.profile.shared_fs)
    around = boxes.look_around(measured)
    told = _describe_boxes(wish, measured, plan, around)
    bare = [each.host for each in around if each.abi < ABI_MIN]
    forbidden = None
    if bare and wish.confined:
        forbidden = SafetyError(
            f"{', '.join(bare)}: no Landlock (Linux 5.19), which would hold the script to its copy",
            hint=UNCONFINED,
        )
    return Site(wish, told, forbidden, lambda say: boxes.drill(wish, measured, place, say))


_WHY_NOT = {
    "slurm": "what holds the script to its copy and ends it without its drill is started with the "
    "job by ssh, and not yet below srun; its nodes are the administrator's to drain",
    "kubernetes": "what holds the script to its copy and ends it without its drill is started with "
    "the job by ssh, and not yet in a pod",
    "notebook": "a session has no address, at which faults could be made to it",
}


def _check_kind(profile: Profile) -> None:
    """Refuse what is no box behind ssh.

    Raises:
        ConfigError: it is none, or none is named.
    """
    hint = "a profile of kind ssh; or without --on, on this machine"
    if why := _WHY_NOT.get(profile.kind):
        raise ConfigError(f"platforms of kind {profile.kind} are not drilled: {why}", hint=hint)
    if not (profile.launch.hosts or profile.launch.host):
        raise ConfigError(f"--on {profile.platform}: no box is named", hint="--host ALIAS")


def _describe_boxes(
    wish: DrillWish, profile: Profile, plan: Plan, around: Sequence[boxes.Surroundings]
) -> list[str]:
    """Return the cost of a drill on boxes, what it touches, and its limits."""
    spec, hosts, overrides = wish.spec, [each.host for each in around], profile.overrides
    size, most_min = measure_project(plan)[0], wish.budget_s / 60
    several = f"{len(hosts)} boxes, " if len(hosts) > 1 else ""
    price = profile.teardown.price_per_hour
    cost = len(hosts) * price * 2 * most_min / 60
    told = [
        f"drill of `{spec.name}` on {several}{', '.join(hosts)} ({profile.platform}): "
        f"{spec.world_size} ranks, {len(wish.acts)} faults "
        f"({', '.join(act.fault for act in wish.acts)}), seed {wish.seed}",
        f"they are used for at most {most_min:.4g} min or so, and as long again for an undisturbed "
        f"run, after the environment was made; its ranks start about {count_starts(wish)} times"
        + (f"; {cost:.2f} {profile.teardown.currency} by the profile's price" if price else "")
        + ". No box is stopped or given back by it",
        f"the project ({size / (1 << 20):.1f} MiB) is sent at each start; there, folders below "
        f"{overrides.DATA_DIR} and {overrides.DURABLE_DIR} named {plan.job[:-6]}... are the "
        "drill's, and removed afterwards; an environment that has to be made stays, as after a "
        f"launch ({overrides.DATA_DIR}/envs)",
        f"where this machine is not heard for {LEASE_S:g} s, all of it ends there by itself",
    ]
    if any(act.fault == "node" for act in wish.acts):
        told.append(
            "node: what the drill's own job has on a box is killed, and nothing else there; the "
            "box itself stays up"
        )
    if not profile.launch.native and any(act.fault == "slow" for act in wish.acts):
        told.append("slow: launch.native = false; without its recorder it may not be found")
    held = "its copy, in the drill's folders and in caches of the home there"
    held += "".join(f", in {path}" for path in wish.writable)
    for each in around:
        if not wish.confined:
            text = "--unconfined: the script may write wherever it wants to"
        elif each.abi < ABI_MIN:
            text = "its kernel has no Landlock: the script cannot be held to its copy"
        else:
            text = f"its kernel lets the script write in {held} only"
            if each.abi < ABI_TRUNCATE:
                text += ", but cannot hold back who cuts a file short by its name (before 6.2)"
        told.append(f"{each.host}: {text}")
        told += [f"{each.host}: is used by others as well: {who}" for who in each.others]
    told += [
        "not held back: what the script sends by a network to an address that it has itself (a "
        "tracking server, a bucket), and what is done for it by another process there",
        "trackers (Weights & Biases, Comet, Neptune, ClearML) are off and their keys stay here, "
        "MLflow writes into the copy",
    ]
    told += list_changes(spec, elsewhere=True)
    return told + [f"{name} is not tried: {why}" for name, why in wish.left_out.items()]
