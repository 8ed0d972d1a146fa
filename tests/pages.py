"""A finished job on disk, and `perdure dash` served beside it."""

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.model.codec import encode
from perdure.telemetry.live.snapshot import SnapshotFold
from tests.journals import Story, render_journal, tell
from tests.waiting import PATIENCE_S


def lay_down(home: Path, name: str = "job", story: Story | None = None) -> Story:
    """Write a job that has ended below `home`, as its controller leaves it."""
    story = story or tell(Story())
    folder = home / "jobs" / name
    (folder / "logs/ranks/g2").mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    story.lay_curves(folder)
    fold = SnapshotFold(story.spec)
    for entry in story.entries:
        fold.add(entry)
    (folder / "state.json").write_bytes(encode(fold.snapshot(story.now)))
    endpoint = {"url": "nats://127.0.0.1:1", "token": "", "clock_offset_s": 0}
    (folder / "endpoint.json").write_text(json.dumps(endpoint))
    return story


def lay_down_large(home: Path) -> None:
    """Write the job `large`, of 10,000 ranks, of which one has crashed."""
    story = Story(nproc=8, nodes=1250)
    story.start()
    story.train(6)
    story.crash(4321)
    story.start()
    story.train(6)
    story.finish()
    lay_down(home, "large", story)


class Page:
    """A `perdure dash`, asked as a browser asks it."""

    def __init__(self, process: "subprocess.Popen[str]", home: Path) -> None:
        self.process, self.home = process, str(home)
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        self.port, self.urls = told["port"], told["urls"]
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = ""

    def enter(self, role: str = "view") -> None:
        """Come in by the address that was printed."""
        path = self.urls[role].partition(self.host)[2]
        status, headers, _ = self.ask(path)
        assert status == 303
        assert "token" not in headers["location"]
        self.cookie = headers["set-cookie"].partition(";")[0]

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers (of lower case) and text."""
        sent = {"Host": self.host, "Cookie": self.cookie}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read().decode()
        finally:
            connection.close()

    def send_raw(self, request: str) -> tuple[int, str]:
        """Send these bytes as a stranger; return the status and the text of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as sent:
            sent.sendall(request.encode("latin-1"))
            answer = http.client.HTTPResponse(sent)
            answer.begin()
            return answer.status, answer.read().decode()

    def steer(self, job: str, **act: Any) -> tuple[int, dict[str, Any]]:
        """Ask for a verb as the page's own script does."""
        status, _, text = self.ask(
            f"/jobs/{job}/ask", method="POST", body=act,
            Origin=f"http://{self.host}", Content_Type="application/json",
        )  # fmt: skip
        return status, json.loads(text)


@contextmanager
def serve(home: Path, *words: str, files_max: int = 0) -> Iterator[Page]:
    """Yield a `perdure dash` of the jobs below `home`, which may open `files_max` files at once."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))

    with subprocess.Popen(
        [sys.executable, "-m", "perdure", "dash", *words, "--port", "0", "--json"],
        env=os.environ | {"PERDURE_HOME": str(home)},
        stdout=subprocess.PIPE, text=True, preexec_fn=limit if files_max else None,
    ) as process:  # fmt: skip
        try:
            yield Page(process, home)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def read_text(html: str) -> str:
    """Return what a page shows, without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
