"""Compute Engine: preemption, and maintenance that ends the machine.

Both are values that change, so each request asks the server to answer only when its value is
another one than the last (`wait_for_change` with `last_etag`), or after a minute: no poll, and
news at once. (Compute Engine, "Preemptible VM instances": up to 30 s until the machine is shut
down; "Get live migration notices": `TERMINATE_ON_HOST_MAINTENANCE` comes 60 s before, with
attached GPUs an hour.)
"""

from urllib.parse import quote

from perdure.adapters.notices.http import TIMEOUT_S, MetadataService
from perdure.model.events import Announced

_URL = "http://metadata.google.internal"
_HEADERS = {"Metadata-Flavor": "Google"}
_WAIT_S = 60


class _Value:
    """One value of the metadata server, waited for."""

    pause_s = 0.0
    name = "gcp"
    path = ""

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at Compute Engine's own address."""
        self._service = MetadataService(url or _URL)
        self._etag = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return what is announced: at once the first time, then when it changes.

        Raises:
            PlatformError: the service cannot be reached, or answers what makes no sense.
        """
        path, timeout_s = f"/computeMetadata/v1/instance/{self.path}", TIMEOUT_S
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={quote(self._etag)}"
            timeout_s += _WAIT_S
        answer = await self._service.ask(path, _HEADERS, timeout_s=timeout_s)
        self._etag = ""
        text = self._service.check(path, answer).text
        self._etag = answer.headers.get("ETag", "")
        return self._tell(text)

    async def acknowledge(self, id_: str) -> None:
        """Do nothing: Compute Engine takes no answer."""

    def _tell(self, value: str) -> tuple[Announced, ...]:
        raise AssertionError("each value has its own meaning")


class GcpPreempted(_Value):
    """`TRUE` from the moment of the preemption on."""

    path = "preempted"

    def _tell(self, value: str) -> tuple[Announced, ...]:
        if value != "TRUE":
            return ()
        return (Announced(id="preempted", reason="preempted", grace_s=30.0),)


class GcpMaintenance(_Value):
    """Maintenance of the host. A live migration is none of ours: the machine stays."""

    path = "maintenance-event"

    def _tell(self, value: str) -> tuple[Announced, ...]:
        if not value.startswith("TERMINATE"):
            return ()
        return (Announced(id="maintenance", reason=value.lower().replace("_", " "), grace_s=60.0),)
