"""`perdure profiles`: what a platform is like, and where each of its values comes from."""

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.speech.say import Json, answer, note, read_meanings, render_table
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.launch.catalog import Resolved
    from perdure.launch.platforms import Here
    from perdure.model.platforms.profile import Profile

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ALIAS",
        help="With --on: the box, by alias of ssh or user@host; several: A,B.",
    ),
]


def profiles(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A profile, or the path of one.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ALIAS", help="With NAME: the box, as in perdure launch."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With NAME: ask the box for what depends on it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the platforms, or show one: each value and its source.

    Your own lie in $PERDURE_HOME/profiles, each a diff against its `base`.
    """
    import msgspec

    from perdure.launch.catalog import describe_source, flatten
    from perdure.model.platforms.profile import list_unmeasured

    home = resolve_home()
    if name is None:
        _list(home, as_json)
        return
    resolved = choose_profile(name, host, home)
    if measure:
        resolved = measure_profile(resolved, here())
    profile = resolved.profile
    values = {
        key: {
            "value": value,
            "from": resolved.origins.get(key, "default"),
            "source": describe_source(resolved, key),
        }
        for key, value in flatten(msgspec.to_builtins(profile)).items()
        if key != "sources"
    }
    parts = (render_profile(resolved), render_danger(profile), render_sources(resolved))
    answer(
        {"profile": profile.platform, "values": values, "unmeasured": list_unmeasured(profile)},
        "\n\n".join(part for part in parts if part),
        as_json=as_json,
    )


def here() -> "Here":
    """Return this machine, as launchers meet it; progress goes to standard error."""
    from perdure.launch.platforms import Here

    return Here(resolve_home(), dict(os.environ), note)


def choose_profile(name: str, host: str | None, home: str) -> "Resolved":
    """Return the profile `name`, for the box `host` where one was named.

    Raises:
        ConfigError: there is none, or it is malformed.
    """
    from perdure.launch.catalog import load_profile, overlay

    resolved = load_profile(name, home)
    if not host:
        return resolved
    hosts = host.split(",")
    named = {"launch.host": hosts[0], "launch.hosts": hosts if len(hosts) > 1 else []}
    return overlay(resolved, named, "--host")


def measure_profile(resolved: "Resolved", on: "Here") -> "Resolved":
    """Return the profile with what the box says in place of `host-dependent`.

    Raises:
        PlatformError: it cannot be reached.
    """
    from perdure.launch.catalog import overlay
    from perdure.launch.platforms import load_platform
    from perdure.model.platforms.profile import list_unmeasured

    platform = load_platform(resolved.profile.kind)
    from perdure.model.job import JobSpec

    boxes = max(1, len(resolved.profile.launch.hosts))
    spec = JobSpec(name="probe", script="probe.py", nodes=boxes)
    values, _ = platform.check(platform.render(spec, resolved.profile), on)
    wanted = set(list_unmeasured(resolved.profile))
    return overlay(resolved, {k: v for k, v in values.items() if k in wanted}, "measured")


def render_danger(profile: "Profile") -> str:
    """Return what has to be known before money is spent: the danger clock, the survival matrix."""
    teardown, grace = profile.teardown, profile.spot_grace
    undo = "it deletes the disk" if profile.meter_stop_irreversible else "the disk stays"
    hourly, session_max_s = teardown.price_per_hour, profile.interruption.session_max_s
    day = f"; {hourly:g} {teardown.currency} an hour, {hourly * 24:.2f} a day" if hourly else ""
    words = f"{grace:g} s after a notice" if isinstance(grace, float) and grace else "at once"
    lines = (
        (profile.danger, f"{'NOTE' if profile.kind == 'local' else 'DANGER':<8}{profile.danger}"),
        (
            not profile.ends_by_itself,
            f"METER   stopped by: {profile.meter_stop_verb} ({undo}){day}",
        ),
        (teardown.keeps_billing, f"        still billed then: {teardown.keeps_billing}"),
        (
            profile.free_egress is False,
            "EGRESS  bytes that leave the platform cost extra: pull from the same zone",
        ),
        (
            profile.spot_available,
            f"SPOT    may be taken away, {words}; checkpoints are what is left",
        ),
        (session_max_s, f"ENDS    after {session_max_s / 3600:g} h at most"),
    )
    head = ("place", "path", "after a stop", "after a destroy", "cap")
    survival = {"yes": "stays", "no": "GONE", "provider": "ask the provider"}
    rows = [
        (t.name, t.path, survival[t.survives_stop], survival[t.survives_destroy], t.cap)
        for t in profile.storage.tiers
    ]
    told = [line for holds, line in lines if holds]
    return "\n".join([*told, *(["", render_table(head, rows)] if rows else [])])


def render_profile(resolved: "Resolved") -> str:
    """Return every value of a profile, what it came from, and what it means."""
    import msgspec

    from perdure.launch.catalog import flatten
    from perdure.model.platforms.profile import HOST_DEPENDENT

    notes = read_key_meanings()
    rows: list[tuple[Any, ...]] = []
    for key, value in flatten(msgspec.to_builtins(resolved.profile)).items():
        if key in ("storage.tiers", "danger", "base", "sources"):
            continue  # The matrix, the danger clock and where facts were read stand below.
        shown = "host-dependent (--measure)" if value == HOST_DEPENDENT else _show(value)
        rows.append((key, shown, resolved.origins.get(key, "default"), notes.get(key, "")))
    return render_table(("key", "value", "from", "meaning"), rows)


def render_sources(resolved: "Resolved") -> str:
    """Return where each fact of a platform was read and when; empty where there is no fact."""
    import msgspec

    from perdure.launch.catalog import describe_source, flatten

    facts: dict[str, list[str]] = {}
    for key in flatten(msgspec.to_builtins(resolved.profile)):
        if source := describe_source(resolved, key):
            facts.setdefault(source, []).append(key)
    rows = [(", ".join(keys), source) for source, keys in facts.items()]
    return render_table(("fact", "read"), rows) if rows else ""


def _list(home: str, as_json: bool) -> None:
    from perdure.launch.catalog import list_profiles, load_profile

    known = {name: load_profile(name, home).profile for name in list_profiles(home)}
    rows = [
        {
            "profile": name,
            "kind": profile.kind,
            "base": profile.base,
            "meter_stop_verb": profile.meter_stop_verb,
            "spot_grace": profile.spot_grace if profile.spot_available else "n/a",
            "danger": profile.danger,
        }
        for name, profile in known.items()
    ]
    table = render_table(
        ("profile", "kind", "meter", "spot, s", "danger"),
        [
            (r["profile"], r["kind"], r["meter_stop_verb"], _show(r["spot_grace"]), r["danger"])
            for r in rows
        ],
    )
    answer({"profiles": rows}, table, as_json=as_json)


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(inner) for inner in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"


def read_key_meanings() -> dict[str, str]:
    """Return dotted key -> what its docstring says, where the key is defined."""
    from perdure.model.input.source import list_sections
    from perdure.model.platforms.profile import Profile

    places: dict[type, str] = {Profile: ""}
    places |= {type_: f"{name}." for name, type_ in list_sections(Profile).items()}
    return {
        place + field: text
        for type_, place in places.items()
        for field, text in read_meanings(type_).items()
    }


def is_terminal() -> bool:
    """Return whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_person(question: str) -> str:
    """Return what a person answers; nothing where nobody can be asked."""
    return input(question).strip() if is_terminal() else ""
