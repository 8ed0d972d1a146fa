"""What a launched job costs, and when a person is reminded of it: after its end, idle, by budget.

Pure: what is remembered goes in, sentences come out. Nothing is ever stopped for it.
"""

from collections.abc import Sequence

from perdure.model.platforms.launching import BoxRow, LaunchRecord, Reminder

IDLE_LOAD = 0.1
"""A machine whose load over a quarter of an hour is below this does nothing."""
_WARN = 0.8
_OVER = ("ended", "killed", "rebooted", "not-started")


def compute_cost(record: LaunchRecord, now_s: float) -> tuple[float, float]:
    """Return the hours since a job was first launched to its boxes, and what they cost; 0: unknown.

    A box that was taken away counts as well, for nobody has said since when.
    """
    hours = max(0.0, now_s - (record.billed_since_s or record.launched_s)) / 3600
    return hours, hours * record.profile.teardown.price_per_hour * (1 + len(record.others))


def collect_reminders(record: LaunchRecord, rows: Sequence[BoxRow], now_s: float) -> list[Reminder]:
    """Return what a person should look after, by how the boxes were when they were last asked."""
    if record.torn_down_s or record.profile.ends_by_itself or record.profile.kind == "local":
        return []
    teardown, job = record.profile.teardown, record.job
    found = []
    if record.stop_asked_s:
        text = (
            f"stop was asked for {(now_s - record.stop_asked_s) / 3600:.1f} h ago, and "
            f"{record.profile.platform} has not said that {record.box} is gone: "
            f"perdure teardown {job} asks again"
        )
        found.append(Reminder(job, "stop-asked", text))
    hourly = teardown.price_per_hour
    price = f", {hourly:g} {teardown.currency} an hour" if hourly else ""
    if rows and all(row.state in _OVER for row in rows) and not record.stop_asked_s:
        ended_s = max(row.ended_s or row.seen_s for row in rows)
        text = (
            f"it has ended {max(0.0, now_s - ended_s) / 3600:.1f} h ago, and {record.box} is "
            f"billed on{price}: perdure pull {job} DIR, verify, teardown"
        )
        found.append(Reminder(job, "ended", text))
    idle = [
        f"it runs, and {row.host} has done nothing for a quarter of an hour "
        f"(load {row.load:.2f}){price}: perdure diagnose {job}"
        for row in rows
        if row.state in ("running", "orphaned") and 0 <= row.load < IDLE_LOAD
    ]
    found += [Reminder(job, "idle", text) for text in idle]
    return [*found, *_remind_of_budget(record, now_s)]


def _remind_of_budget(record: LaunchRecord, now_s: float) -> list[Reminder]:
    teardown = record.profile.teardown
    budget = teardown.budget
    if not budget:
        return []
    hours, cost = compute_cost(record, now_s)
    money = f"{budget:.2f} {teardown.currency}"
    if not teardown.price_per_hour:
        text = f"its budget is {money}, and the profile has no price: teardown.price_per_hour"
    elif cost >= budget:
        text = (
            f"its budget of {money} is spent: {cost:.2f} in {hours:.1f} h; nothing is stopped "
            f"for it: perdure stop {record.job}, pull, verify, teardown"
        )
    elif cost >= _WARN * budget:
        left = (budget - cost) / (cost / hours)
        text = f"{cost:.2f} of its budget of {money} are spent; the rest lasts {left:.1f} h"
    else:
        return []
    return [Reminder(record.job, "budget", text)]
