"""Where a job's results are read from: a box over SSH, or a pod with the job's volume."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from perdure.launch.channel import Channel
from perdure.launch.platforms import Here
from perdure.launch.transfer import pull
from perdure.model.platforms.launching import LaunchRecord, PulledFile


class Bring(Protocol):
    """How files get here."""

    def __call__(
        self,
        source: str,
        target: Path,
        files: Sequence[PulledFile],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Bring `files`, named relative to the absolute folder `source` there, into `target`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A place that can be asked, and that files come from."""

    channel: Channel
    bring: Bring
    python: str = "python3"
    """The Python there."""


Sources = Mapping[str, Source]
"""Name of a box -> where its results are read."""


@contextmanager
def open_sources(record: LaunchRecord, here: Here) -> Iterator[Sources]:
    """Yield where the results of a job are, for as long as they are read.

    Raises:
        PlatformError: a pod for it cannot be made.
    """
    if record.profile.kind != "kubernetes":
        channels = {box.box: Channel(box.profile.launch) for box in record.boxes}
        yield {name: Source(one, partial(_pull_by_rsync, one)) for name, one in channels.items()}
        return
    from perdure.launch.kubernetes.fetching import fetch
    from perdure.launch.kubernetes.reader import open_pod

    with open_pod(record, here) as pod:
        yield {record.box: Source(pod, partial(fetch, pod), record.python)}


def _pull_by_rsync(
    channel: Channel,
    source: str,
    target: Path,
    files: Sequence[PulledFile],
    *,
    tell: Callable[[str], None],
) -> None:
    pull(channel, source, target, [file.path for file in files], tell=tell)
