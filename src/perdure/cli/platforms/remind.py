"""`perdure remind`: what launched jobs cost that nobody looks after; lines of `ps` and `status`."""

import asyncio
import contextlib
import time
from pathlib import Path

from perdure.cli.jobs import find_elsewhere
from perdure.cli.platforms.boxes import look_at_boxes, read_seen
from perdure.cli.platforms.profiles import here
from perdure.cli.running.options import Json
from perdure.cli.speech.say import print_json
from perdure.launch.platforms import Here
from perdure.launch.reminding import find_reminders
from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import LaunchRecord, Reminder
from perdure.service.controller.alerts import Alerter
from perdure.service.jobfiles import read_document, resolve_home, write_document
from perdure.telemetry.alerts import Alert

AGAIN_S = 24 * 3600.0
"""An alert of the same kind for the same job is sent again after this."""


def list_reminders(record: LaunchRecord, home: str) -> list[Reminder]:
    """Return what a person should look after, by what was last seen; nobody is asked."""
    return find_reminders(record, read_seen(home, record.job), time.time())


def remind(as_json: Json = False) -> int:
    """Ask every box of a launched job, and say what costs money that nobody looks after.

    Each reminder goes to the job's own [alerts] too, once a day: cron may run this. Nothing is
    ever stopped by it.
    """
    home = resolve_home()
    place = here(home)
    found: list[Reminder] = []
    undelivered = 0
    for record in find_elsewhere():
        if not record.profile.ends_by_itself:
            look_at_boxes(record, place)
        mine = list_reminders(record, home)
        found += mine
        undelivered += _send(record, mine, place)
    if as_json:
        print_json({"reminders": found, "undelivered": undelivered})
    else:
        for reminder in found:
            print(f"{reminder.job}: {reminder.text}")
        if not found:
            print("nothing to look after")
    return 3 if undelivered else 0


def _send(record: LaunchRecord, reminders: list[Reminder], place: Here) -> int:
    """Send each reminder to the job's alerts, unless it was a day ago or less; return the lost."""
    alerter = Alerter(record.job, record.alerts)
    path = Path(place.home, "launches", "seen", f"{record.job}.reminded.json")
    sent = read_document(str(path), dict[str, float]) or {}
    now_s = time.time()
    due = [r for r in reminders if now_s - sent.get(r.kind, 0.0) > AGAIN_S]
    if not alerter.wanted or "meter" not in record.alerts.events or not due:
        return 0

    async def deliver() -> None:
        for reminder in due:
            before = alerter.dropped
            text = reminder.text
            await alerter.send(Alert(job=record.job, kind="meter", summary=text, at_s=now_s))
            if alerter.dropped == before:
                sent[reminder.kind] = now_s
            else:
                place.tell(f"{record.job}: the alert was not delivered: {text}")

    asyncio.run(deliver())
    with contextlib.suppress(PlatformError):  # A full disk here hides no reminder.
        write_document(str(path), sent)
    return alerter.dropped
