"""What clouds announce to a machine: by EC2's, Azure's and Compute Engine's metadata services.

EC2 has spot interruption notices and rebalance recommendations, by IMDSv2. `spot/instance-action`
answers 404 until two minutes before the instance is interrupted, and then says what and when; AWS
asks to look every five seconds. (EC2 User Guide, "Spot Instance interruption notices", "EC2
instance rebalance recommendations", "Use IMDSv2".)

Azure lists scheduled events with the machines that each is about, of a whole scale set, so that the
machine's own name is asked for first. `NotBefore` is empty once an event has started. Who is done
may answer, and Azure does not wait any longer. (Azure, "Scheduled Events for Linux VMs",
api-version 2020-07-01: preemption at least 30 s before, termination 5 to 15 minutes.)

Compute Engine has two values that change, preemption and maintenance that ends the machine, so each
request asks the server to answer only when its value is another one than the last
(`wait_for_change` with `last_etag`), or after a minute: no poll, and news at once. (Compute Engine,
"Preemptible VM instances": up to 30 s until the machine is shut down; "Get live migration notices":
`TERMINATE_ON_HOST_MAINTENANCE` comes 60 s before, with attached GPUs an hour.)
"""

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import msgspec

from perdure.adapters.notices.http import TIMEOUT_S, Answer, MetadataService, Source
from perdure.model.errors import PlatformError
from perdure.model.events import Announced

_LINK_LOCAL = "http://169.254.169.254"
_TOKEN, _TTL_S = "/latest/api/token", 21_600
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class AwsNotices(Source):
    """What EC2 has announced for this instance."""

    name = "aws"

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at EC2's own address."""
        self._service = MetadataService(url or _LINK_LOCAL)
        self._token = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return the interruption and the recommendation, as far as there are any."""
        found = []
        if action := await self._get(_ACTION):
            what, when = str(action.get("action", "")), str(action.get("time", ""))
            at_once = what == "hibernate"  # It begins with the notice.
            found.append(
                Announced(
                    id=f"{what} {when}",
                    reason=f"spot {what}",
                    gone_s=None if at_once else _parse_time(when),
                    grace_s=0.0 if at_once else None,
                )
            )
        if rebalance := await self._get(_REBALANCE):
            id_, reason = f"rebalance {rebalance.get('noticeTime', '')}", "rebalance recommendation"
            found.append(Announced(id=id_, reason=reason, certain=False))
        return tuple(found)

    async def _get(self, path: str) -> dict[str, Any]:
        """Return the JSON at `path`; empty where there is nothing."""
        answer = await self._ask(path, 401)
        if answer.status == 401:  # The token is over.
            self._token = ""
            answer = await self._ask(path)
        if answer.status == 404:
            return {}
        return self._service.parse(path, answer, dict[str, Any])

    async def _ask(self, path: str, *expected: int) -> Answer:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TTL_S)}
            self._token = (await self._service.ask(_TOKEN, ttl, method="PUT")).text
        headers = {"X-aws-ec2-metadata-token": self._token}
        return await self._service.ask(path, headers, expected=(200, 404, *expected))


def _parse_time(text: str) -> float | None:
    """Return `2017-09-18T08:22:00Z` as seconds since 1970; None where it is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


_SCHEDULED = "/metadata/scheduledevents?api-version=2020-07-01"
_MACHINE = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_HEADERS = {"Metadata": "true"}
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


class AzureNotices(Source):
    """What Azure has scheduled for this machine."""

    name = "azure"
    pause_s = 1.0

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at Azure's own address."""
        self._service = MetadataService(url or _LINK_LOCAL)
        self._me = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return the events that end this machine."""
        if not self._me:
            self._me = (await self._service.ask(_MACHINE, _AZURE_HEADERS)).text
        answer = await self._service.ask(_SCHEDULED, _AZURE_HEADERS)
        listed = self._service.parse(_SCHEDULED, answer, _Events)
        mine = [e for e in listed.events if e.event_type in _GOING and self._me in e.resources]
        return tuple(_tell(event) for event in mine)

    async def acknowledge(self, id_: str) -> None:
        """Tell Azure that event `id_` may begin."""
        body = msgspec.json.encode({"StartRequests": [{"EventId": id_}]})
        await self._service.ask(_SCHEDULED, _AZURE_HEADERS, method="POST", body=body)


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


_GCP_URL = "http://metadata.google.internal"
_GCP_HEADERS = {"Metadata-Flavor": "Google"}
_GCP_WAIT_S = 60


class _Value(Source):
    """One value of the metadata server, waited for: at once the first time, then when it changes.

    It announces the end of the machine where it begins with `going`.
    """

    pause_s = 0.0
    name = "gcp"
    path, going = "", ""
    announced = Announced(id="", reason="")

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at Compute Engine's own address."""
        self._service = MetadataService(url or _GCP_URL)
        self._etag = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return what is announced."""
        path, timeout_s = f"/computeMetadata/v1/instance/{self.path}", TIMEOUT_S
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={_GCP_WAIT_S}&last_etag={quote(self._etag)}"
            timeout_s += _GCP_WAIT_S
        self._etag = ""
        answer = await self._service.ask(path, _GCP_HEADERS, timeout_s=timeout_s)
        self._etag = answer.headers.get("ETag", "")
        return (self.announced,) if answer.text.startswith(self.going) else ()


class GcpPreempted(_Value):
    """`TRUE` from the moment of the preemption on."""

    path, going = "preempted", "TRUE"
    announced = Announced(id="preempted", reason="preempted", grace_s=30.0)


class GcpMaintenance(_Value):
    """Maintenance of the host. A live migration is none of ours: the machine stays."""

    path, going = "maintenance-event", "TERMINATE"
    announced = Announced(id="maintenance", reason="terminate on host maintenance", grace_s=60.0)
