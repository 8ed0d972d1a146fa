"""Azure: scheduled events of this virtual machine.

The list names the machines that each event is about, of a whole scale set, so that the machine's
own name is asked for first. `NotBefore` is empty once an event has started. Who is done may
answer, and Azure does not wait any longer. (Azure, "Scheduled Events for Linux VMs",
api-version 2020-07-01: preemption at least 30 s before, termination 5 to 15 minutes.)
"""

from email.utils import parsedate_to_datetime

import msgspec

from perdure.adapters.notices.http import MetadataService, parse_answer
from perdure.model.errors import PlatformError
from perdure.model.events import Announced

_URL = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_GOING = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""`Freeze` is a pause of seconds: the machine stays."""


class _Event(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resources: tuple[str, ...] = ()
    event_status: str = ""
    not_before: str = ""
    description: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    document_incarnation: int
    events: tuple[_Event, ...]


class AzureNotices:
    """What Azure has scheduled for this machine."""

    name = "azure"
    pause_s = 1.0

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at Azure's own address."""
        self._service = MetadataService(url or _URL)
        self._me = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return the events that end this machine.

        Raises:
            PlatformError: the service cannot be reached, or answers what makes no sense.
        """
        if not self._me:
            self._me = (await self._get(_NAME)).decode(errors="replace").strip()
        listed = parse_answer(f"{self._service.url}{_EVENTS}", await self._get(_EVENTS), _Events)
        mine = [e for e in listed.events if e.event_type in _GOING and self._me in e.resources]
        return tuple(_tell(event) for event in mine)

    async def acknowledge(self, id_: str) -> None:
        """Tell Azure that event `id_` may begin.

        Raises:
            PlatformError: it does not take the answer.
        """
        body = msgspec.json.encode({"StartRequests": [{"EventId": id_}]})
        answer = await self._service.ask(_EVENTS, _HEADERS, method="POST", body=body)
        self._service.check(_EVENTS, answer)

    async def _get(self, path: str) -> bytes:
        return self._service.check(path, await self._service.ask(path, _HEADERS)).body


def _tell(event: _Event) -> Announced:
    """Return what `event` says; one that has started is at its end already."""
    gone_s, grace_s = None, 0.0 if event.event_status == "Started" else None
    if event.not_before:
        try:
            gone_s = parsedate_to_datetime(event.not_before).timestamp()
        except ValueError as error:
            raise PlatformError(f"azure: NotBefore `{event.not_before}`: {error}") from None
    return Announced(
        id=event.event_id, reason=event.event_type.lower(), gone_s=gone_s, grace_s=grace_s
    )
