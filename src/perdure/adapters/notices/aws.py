"""EC2: spot interruption notices and rebalance recommendations, by IMDSv2.

`spot/instance-action` answers 404 until two minutes before the instance is interrupted, and then
says what and when; AWS asks to look every five seconds. (EC2 User Guide, "Spot Instance
interruption notices", "EC2 instance rebalance recommendations", "Use IMDSv2".)
"""

from datetime import datetime
from typing import Any

from perdure.adapters.notices.http import Answer, MetadataService, parse_answer
from perdure.model.events import Announced

_URL = "http://169.254.169.254"
_TOKEN, _TTL_S = "/latest/api/token", 21_600
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class AwsNotices:
    """What EC2 has announced for this instance."""

    name = "aws"
    pause_s = 5.0

    def __init__(self, url: str = "") -> None:
        """Ask at `url`, or at EC2's own address."""
        self._service = MetadataService(url or _URL)
        self._token = ""

    async def read(self) -> tuple[Announced, ...]:
        """Return the interruption and the recommendation, as far as there are any.

        Raises:
            PlatformError: the service cannot be reached, or answers what makes no sense.
        """
        found = []
        action = await self._get(_ACTION)
        if action is not None:
            what, when = str(action.get("action", "")), str(action.get("time", ""))
            gone_s = _parse_time(when)
            at_once = 0.0 if what == "hibernate" else None  # It begins with the notice.
            found.append(
                Announced(
                    id=f"{what} {when}",
                    reason=f"spot {what}",
                    gone_s=None if what == "hibernate" else gone_s,
                    grace_s=at_once,
                )
            )
        rebalance = await self._get(_REBALANCE)
        if rebalance is not None:
            since = str(rebalance.get("noticeTime", ""))
            reason = "rebalance recommendation"
            found.append(Announced(id=f"rebalance {since}", reason=reason, certain=False))
        return tuple(found)

    async def acknowledge(self, id_: str) -> None:
        """Do nothing: EC2 takes no answer."""

    async def _get(self, path: str) -> dict[str, Any] | None:
        """Return the JSON at `path`; None where there is nothing."""
        answer = await self._ask(path)
        if answer.status == 401:  # The token is over.
            self._token = ""
            answer = await self._ask(path)
        if answer.status == 404:
            return None
        body = self._service.check(path, answer).body
        return parse_answer(f"{self._service.url}{path}", body, dict[str, Any])

    async def _ask(self, path: str) -> Answer:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TTL_S)}
            granted = await self._service.ask(_TOKEN, ttl, method="PUT")
            self._token = self._service.check(_TOKEN, granted).text
        return await self._service.ask(path, {"X-aws-ec2-metadata-token": self._token})


def _parse_time(text: str) -> float | None:
    """Return `2017-09-18T08:22:00Z` as seconds since 1970; None where it is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
