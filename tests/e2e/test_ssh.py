"""A box behind a real sshd: a job is launched, the connection breaks, the results come home."""

import json
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.cli.page import dash
from perdure.launch.channel import Channel
from perdure.model.platforms.profile import LaunchSection
from tests.e2e.box import EXAMPLE, Laptop, make_boxes, needs_sshd
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.torch, needs_sshd]

JOB = """\
name = "gpt"
script = "train.py"
args = ["--steps", "300", "--layers", "1", "--width", "32", "--context", "16", "--batch-size", "2"]
env = { OMP_NUM_THREADS = "1" }
[checkpoint]
every_steps = 150
[launch]
project = "gpt"
secrets = ["HF_TOKEN"]
"""


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    """Return a laptop with a box."""
    for make in make_boxes(tmp_path):
        yield make()


def hold_at_step_100(script: Path) -> None:
    """Let the job live until its connection is cut: there it waits for a file in the box's home."""
    text, loop = script.read_text(), "        optimizer.zero_grad"
    assert text.count(loop) == 1
    wait = "        while step == 100 and not os.path.exists(os.path.expanduser('~/go')):\n"
    wait += "            __import__('time').sleep(0.05)\n"
    script.write_text(text.replace(loop, wait + loop))


def test_a_job_outlives_its_connection_and_its_box_is_given_back_last(laptop: Laptop) -> None:
    project = laptop.folder / "gpt"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    hold_at_step_100(project / "train.py")
    (project / "prepare.sh").write_bytes(b"#!/bin/sh\r\necho ready\r\n")
    (project / "prepare.sh").chmod(0o644)
    (laptop.folder / "job.toml").write_text(JOB)
    laptop.env["HF_TOKEN"] = "hf_very'secret"
    told = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert "DANGER" in told
    assert "mended line ends of" in told

    # The output goes on where it was when every connection is cut under it.
    attached = laptop.start("attach", "gpt")
    assert attached.stdout is not None
    lines = [attached.stdout.readline()]
    wait_until(laptop.box.cut, "a connection to cut")
    (laptop.box.home / "go").touch()
    lines += attached.stdout  # Not by communicate(), which forgets what readline() has read ahead.
    err = attached.communicate(timeout=PATIENCE_S)[1]
    assert attached.returncode == 0, err
    steps = [int(line.split()[3]) for line in lines if " loss " in line]
    assert steps == list(range(0, 300, 50))

    # What is on the box is what was sent, mended; the secret is in its file and nowhere else.
    there = laptop.box.home / "perdure" / "gpt"
    script = there / "project" / "prepare.sh"
    assert script.read_bytes() == b"#!/bin/sh\necho ready\n"
    assert script.stat().st_mode & 0o100
    secret = laptop.box.home / ".perdure-credentials-gpt"
    assert secret.stat().st_mode & 0o777 == 0o600
    files = [path for path in laptop.box.home.rglob("*") if path.is_file() and path != secret]
    assert not [path for path in files if b"hf_very" in path.read_bytes()]

    # The page is served there and seen here, and both end together.
    with laptop.start("dash", "gpt", "--port", "0", "--json") as page:
        assert page.stdout is not None
        told = page.stdout.readline()
        assert "urls" in told, told
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(json.loads(told)["urls"]["view"], timeout=PATIENCE_S) as shown:
            assert "<title>gpt: done</title>" in shown.read().decode()
        page.send_signal(signal.SIGINT)
        assert page.wait(PATIENCE_S) == 0
    wait_until(
        lambda: not [p for p in laptop.box.find_processes() if "dash" in p.cmdline()],
        "the end of the page's server",
    )

    # Nothing is given back before it was pulled, verified and confirmed.
    assert "nothing was pulled" in laptop.cli("teardown", "gpt", "--confirm", "gpt", code=4).stderr
    laptop.cli("pull", "gpt", "pulled")
    newest = sorted((laptop.folder / "pulled/job/checkpoints").glob("step-*/rank-0.pt"))[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1])
    assert "rank-0.pt has" in laptop.cli("verify", "pulled", code=3).stdout
    newest.write_bytes(whole)
    assert laptop.ask("verify", "pulled")["ok"]
    laptop.cli("teardown", "gpt", "--confirm", "gpt", "--others-agree")
    assert Path(f"{laptop.stopped}-gpt").exists()
    assert not secret.exists()


@pytest.mark.parametrize(
    ("config", "options", "shell"),
    [
        ("ClearAllForwardings yes", (), "/bin/sh"),
        ("PermitLocalCommand yes", ("LocalCommand=true",), "/bin/sh"),
        ("PermitLocalCommand no", ("PermitLocalCommand=no",), "/bin/sh"),
        ("ControlMaster auto", ("ControlPath={}/%C", "ControlPersist=60"), "/bin/sh"),
        ("LocalCommand true", (), "/nonexistent"),
    ],
)
def test_a_port_is_forwarded_whatever_the_user_has_set_for_ssh(
    laptop: Laptop,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    options: tuple[str, ...],
    shell: str,
) -> None:
    """Such as another local command, or the shell of the machine that a container came from."""
    monkeypatch.setenv("SHELL", shell)
    text = laptop.ssh_config.read_text()
    laptop.ssh_config.write_text(f"Host *\n  {config}\n{text}")
    options = tuple(option.format(laptop.folder) for option in options)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    section = LaunchSection(
        host=laptop.box.name, ssh_config=str(laptop.ssh_config), ssh_options=options
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as far,
        Channel(section).connect_port(port, far.getsockname()[1]) as way,
    ):
        try:
            dash._wait_port(port, way)
            far.settimeout(PATIENCE_S)
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
                far.accept()[0].close()
        finally:
            way.terminate()
