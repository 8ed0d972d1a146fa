"""What can be checked of a platform from this machine, and what cannot."""

import time
from datetime import UTC, datetime, timedelta

import msgspec

from perdure.cli.platforms.profiles import here, measure_profile
from perdure.launch.catalog import Resolved, describe_source, flatten
from perdure.launch.results.gone import ask_gone, fill_words
from perdure.model.errors import PerdureError
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.platforms.profile import Profile, list_unmeasured
from perdure.model.platforms.traps import Check

OLD = timedelta(days=180)
"""A source that was read so long ago is looked at again before one builds on it."""


def check_platform(resolved: Resolved) -> tuple[Check, ...]:
    """Return whether the place answers, whether its meter can be stopped, and how old facts are."""
    return (check_place(resolved), check_meter(resolved.profile), check_sources(resolved))


def check_place(resolved: Resolved) -> Check:
    """Ask the place for what depends on it, if it can be asked from here."""
    profile = resolved.profile
    unaddressed = {"local": "it is this machine", "notebook": "a session has no address"}
    if profile.kind == "ssh" and not profile.launch.host:
        unaddressed["ssh"] = "the profile has no box"
    if profile.kind in unaddressed:
        unknown = ", ".join(list_unmeasured(profile)) or "nothing"
        return Check(
            name="place",
            state="note",
            evidence=f"not asked, {unaddressed[profile.kind]}; not known from here: {unknown}",
            mend="launch.host, or --host ALIAS" if profile.kind == "ssh" else "",
        )
    began = time.perf_counter()
    try:
        left = list_unmeasured(measure_profile(resolved, here()).profile)
    except PerdureError as error:
        return Check(
            name="place",
            state="degraded",
            evidence=f"it was asked, and did not answer: {error.message}",
            mend=error.hint,
        )
    took_s = time.perf_counter() - began
    rest = f"; not known all the same: {', '.join(left)}" if left else ""
    return Check(name="place", state="ok", evidence=f"answers in {took_s:.1f} s{rest}")


def check_meter(profile: Profile) -> Check:
    """Say whether the platform can be told to stop billing from here; it is only asked."""
    teardown = profile.teardown
    if not teardown.stop_command:
        return Check(
            name="meter",
            state="note" if profile.ends_by_itself else "degraded",
            evidence=f"stopped by hand: {teardown.how or 'the profile does not say how'}",
            mend="teardown.stop_command and gone_command, if the platform has any",
        )
    record = LaunchRecord(job="job", profile=profile, place="", home="", python="")
    if not fill_words(record, teardown.stop_command):
        return Check(
            name="meter",
            state="degraded",
            evidence="the profile has no teardown.id, so that nothing is asked or stopped",
            mend="teardown.id, or perdure teardown JOB --id ID",
        )
    answer = ask_gone(record)
    if answer is None:
        return Check(
            name="meter",
            state="degraded",
            evidence="it can be stopped, and nobody says whether it is",
            mend="teardown.gone_command and gone_when",
        )
    state = "the platform says that it is gone, or never was" if answer.gone else answer.said
    if answer.gone or answer.code:
        return Check(
            name="meter",
            state="degraded",
            evidence=f"{teardown.id or profile.platform}: {state or f'exit code {answer.code}'}",
            mend="another teardown.id, or the account, key, region or zone of this shell",
        )
    return Check(name="meter", state="ok", evidence=f"{teardown.id or 'it'} is known: {state}")


def check_sources(resolved: Resolved) -> Check:
    """Say how many of a shipped profile's facts have a source, and when the oldest was read."""
    told = [
        describe_source(resolved, key) for key in flatten(msgspec.to_builtins(resolved.profile))
    ]
    facts = [source for source in told if source]
    known = [source for source in facts if source != "source not known"]
    read = sorted(one.read for one in resolved.profile.sources)
    evidence = f"{len(known)} of {len(facts)} facts say where they were read"
    if not read:
        return Check(name="sources", state="note", evidence=evidence)
    since = datetime.strptime(read[0][:7], "%Y-%m").replace(tzinfo=UTC)
    old = datetime.now(UTC) - since > OLD
    return Check(
        name="sources",
        state="degraded" if old else "ok",
        evidence=f"{evidence}, the oldest {read[0]}",
        mend=f"look again: perdure profiles {resolved.profile.platform} names each",
    )
