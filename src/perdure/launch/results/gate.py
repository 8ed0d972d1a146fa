"""The gate before anything is destroyed: what was made is here, whole, and a person has said so.

Pure: what is known goes in, obstacles come out. While there is one, no stop verb is run.
"""

from collections.abc import Iterable, Sequence

from perdure.launch.exchange import name_first
from perdure.model.platforms.launching import (
    BoxState,
    Finding,
    LaunchRecord,
    PullManifest,
    PullVerified,
)
from perdure.traps.findings import error

NAMED_MAX = 3
"""Of files that are in the way so many are named; the others are counted."""


def find_obstacles(
    record: LaunchRecord,
    *,
    states: Sequence[BoxState | None],
    on_box: PullManifest | None,
    pulled: PullManifest | None,
    verified: PullVerified | None,
    differences: list[str],
    box_is_gone: bool,
    known: frozenset[str] = frozenset(),
    nothing_to_keep: bool = False,
) -> list[Finding]:
    """Return why the box of `record` may not be given back yet; empty where it may.

    `states` are those of its boxes. They and `on_box` are None where a box does not answer, which
    is an obstacle by itself unless a person has said that it is gone. `differences` are between
    the pulled files and their manifest, as they lie here at this moment. `known` are other jobs
    that were launched from here, and are looked at by themselves. With `nothing_to_keep` a person
    has said that whatever is on the box may go with it.
    """
    job, folder = record.job, record.pulled_to
    pull = f"perdure pull {job} {folder or 'DIR'}"
    mine = {job, *(box.place.rpartition("/")[2] for box in (record, *record.others))} | known
    strangers = sorted(set(on_box.others) - mine if on_box and is_destroyed(record) else ())
    found = [
        *_refuse(
            None in states and not box_is_gone,
            "the box does not answer, and what is on it is not known",
            "try again; --box-is-gone where it was taken away",
        ),
        *(
            one
            for state in states
            if state is not None and not state.over
            for one in _refuse(
                True, f"the job is {state.state}: {state.reason}", f"perdure stop {job}"
            )
        ),
        *_refuse(
            strangers,
            f"job `{next(iter(strangers), '')}` is on the box, and was not launched from here",
            "whose is it? --others-agree once they have said that it may go",
        ),
    ]
    if nothing_to_keep:
        return found
    if pulled is None:
        text = f"{folder} holds no pulled job" if folder else "nothing was pulled"
        lost = (
            f"; perdure teardown {job} --forget where nothing can be saved" if box_is_gone else ""
        )
        return found + _refuse(True, text, pull + lost)
    loads = verified is None or verified.nothing_to_keep or (verified.loaded and verified.tensors)
    found += [
        *_refuse(pulled.job != job, f"{folder} holds job `{pulled.job}`", pull),
        *_refuse(differences, f"{folder}: {next(iter(differences), '')}", pull),
        *_refuse(verified is None, "the pull was not verified", f"perdure verify {folder}"),
        *_refuse(
            not loads,
            "of what was pulled nothing has a tensor in it",
            f"perdure verify {folder} --nothing-to-keep, if that is right",
        ),
    ]
    return found + (_compare_box(on_box, pulled, pull) if on_box else [])


def _compare_box(on_box: PullManifest, pulled: PullManifest, pull: str) -> list[Finding]:
    """Return what is on the box and not here, for all that is known."""
    here = {(file.path, file.sha256) for file in pulled.files}
    newer = [file.path for file in on_box.files if (file.path, file.sha256) not in here]
    return [
        *(
            one
            for why in on_box.unread[:NAMED_MAX]
            for one in _refuse(
                True,
                f"on the box, and only there, for all that is known: {why}",
                f"--leave {why.partition(': ')[0]!r} leaves it behind",
            )
        ),
        *_refuse(
            newer,
            f"{name_first(newer, 1)} on the box is not what was pulled",
            f"{pull}; --leave {next(iter(newer), '')!r} leaves it behind",
        ),
    ]


def _refuse(when: object, text: str, hint: str) -> list[Finding]:
    return error(when, text, hint, "GEN1")


def list_changed_files(before: PullManifest, now: PullManifest) -> list[str]:
    """Return the files that are on the box now and were not, or not so, when it was looked at."""
    known = {(file.path, file.bytes, file.stamp) for file in before.files}
    return [
        *(f.path for f in now.files if (f.path, f.bytes, f.stamp) not in known),
        *(why for why in now.unread if why not in before.unread),
    ]


def is_destroyed(record: LaunchRecord) -> bool:
    """Return whether the stop verb takes a whole machine, with whatever else is on it."""
    return record.profile.kind == "ssh" and not record.profile.ends_by_itself


def list_neighbours(record: LaunchRecord, records: Iterable[LaunchRecord]) -> list[LaunchRecord]:
    """Return the other jobs that the stop verb of `record` would take along: those on its boxes."""
    hosts = _list_hosts(record)
    if not is_destroyed(record):
        return []
    return [
        other
        for other in records
        if other.job != record.job
        and other.profile.kind == "ssh"
        and not other.torn_down_s
        and not hosts.isdisjoint(_list_hosts(other))
    ]


def list_known_jobs(record: LaunchRecord, records: Iterable[LaunchRecord]) -> frozenset[str]:
    """Return the jobs that were launched from here to the boxes of `record`, torn down or not.

    A job of the same name elsewhere is another one.
    """
    hosts = _list_hosts(record)
    return frozenset(
        other.job
        for other in records
        if other.profile.kind == record.profile.kind
        and (not hosts.isdisjoint(_list_hosts(other)) or not (hosts or _list_hosts(other)))
    )


def _list_hosts(record: LaunchRecord) -> set[str]:
    boxes = (record, *record.others)
    return {box.profile.launch.host for box in boxes if box.profile.launch.host}
