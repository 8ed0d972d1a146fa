"""The gate before anything is destroyed: what was made is here, whole, and a person has said so.

Pure: what is known goes in, obstacles come out. While there is one, no stop verb is run.
"""

from collections.abc import Iterable, Sequence

from perdure.model.launching import BoxState, Finding, LaunchRecord, PullManifest, PullVerified


def find_obstacles(
    record: LaunchRecord,
    *,
    states: Sequence[BoxState | None],
    on_box: PullManifest | None,
    pulled: PullManifest | None,
    verified: PullVerified | None,
    differences: list[str],
    box_is_gone: bool,
) -> list[Finding]:
    """Return why the box of `record` may not be given back yet; empty where it may.

    `states` are those of its boxes. They and `on_box` are None where a box does not answer, which
    is an obstacle by itself unless a person has said that it is gone. `differences` are between
    the pulled files and their manifest, as they lie here at this moment.
    """
    job = record.job
    pull = f"perdure pull {job} {record.pulled_to or 'DIR'}"
    found: list[Finding] = []

    def refuse(text: str, hint: str) -> None:
        found.append(Finding("error", text, hint, "GEN1"))

    if None in states and not box_is_gone:
        refuse("the box does not answer, and what is on it is not known",
               "try again; --box-is-gone where it was taken away")  # fmt: skip
    for state in states:
        if state is not None and not state.over:
            refuse(f"the job is {state.state}: {state.reason}", f"perdure stop {job}")
    if pulled is None:
        refuse("nothing was pulled" if not record.pulled_to else
               f"{record.pulled_to} holds no pulled job", pull)  # fmt: skip
        return found
    if pulled.job != job:
        refuse(f"{record.pulled_to} holds job `{pulled.job}`", pull)
    if differences:
        refuse(f"{record.pulled_to}: {differences[0]}", pull)
    if verified is None:
        refuse("the pull was not verified", f"perdure verify {record.pulled_to}")
    if on_box is not None:
        here = {(file.path, file.sha256) for file in pulled.files}
        newer = [file.path for file in on_box.files if (file.path, file.sha256) not in here]
        if newer:
            more = f" and {len(newer) - 1} more" if len(newer) > 1 else ""
            refuse(f"{newer[0]}{more} on the box is not what was pulled", pull)
    return found


def find_neighbours(record: LaunchRecord, records: Iterable[LaunchRecord]) -> list[LaunchRecord]:
    """Return the other jobs that the stop verb of `record` would take along: those on its boxes."""
    hosts = _list_hosts(record)
    if record.profile.kind != "ssh" or record.profile.ends_by_itself:
        return []
    return [
        other
        for other in records
        if other.job != record.job
        and other.profile.kind == "ssh"
        and not other.torn_down_s
        and not hosts.isdisjoint(_list_hosts(other))
    ]


def _list_hosts(record: LaunchRecord) -> set[str]:
    boxes = (record, *record.others)
    return {box.profile.launch.host for box in boxes if box.profile.launch.host}
