"""Act `links`: a slow network link is made, and found.

Four nodes, each in a network namespace of its own, train over a bridge; then one directed link is
slowed to 100 Mbit/s and the next moment perdure says which. Needs root and iproute2 and says so
where it cannot. The network is the one of the fault laboratory (`tests/lab`, `docs/lab.md`).
"""

import sys
import time
from typing import Any

from demo_job import HOME, ROOT, DemoJob, say, set_up

LEARN_S, FIND_S = 12.0, 20.0
SLOW_LINK = ("slow-link", "--rank", "2", "--arg", "to=1", "--arg", "mbit=100")

sys.path.insert(0, str(ROOT))
from tests.lab.network import Lab, why_not  # noqa: E402


def wait_until_running(job: DemoJob, timeout_s: float) -> bool:
    """Return whether the job trains within `timeout_s`."""
    end = time.monotonic() + timeout_s
    while job.ask("status", job.name).get("state") != "running":
        if time.monotonic() > end or not job.runs:
            return False
        time.sleep(0.3)
    return True


def find_slow_link(job: DemoJob) -> tuple[dict[str, Any] | None, set[str]]:
    """Return the verdict that names the slow link, None without one; and what else was told."""
    began, kinds = time.monotonic(), set[str]()
    while time.monotonic() - began < FIND_S:
        for verdict in job.ask("diagnose", job.name).get("verdicts", []):
            kinds.add(verdict["kind"])
            if verdict["kind"] == "CommSlow":
                return verdict, kinds
        time.sleep(0.2)
    return None, kinds


def train(lab: Lab) -> int:
    """Train on the lab's nodes, slow a link, tell what was found."""
    placement, script = str(lab.write_placement(HOME)), str(ROOT / "tests" / "lab" / "train.py")
    run = ("-c", "examples/demo_links.toml", "--nodes", str(lab.nodes), "--placement", placement)
    job = DemoJob("links", *run, script, "--declare")
    try:
        if not wait_until_running(job, 90.0):
            say(f"  the job did not train within 90 s; its output: {job.output}")
            return 1
        time.sleep(LEARN_S)
        began = time.monotonic()
        job.inject(*SLOW_LINK)
        verdict, kinds = find_slow_link(job)
        if verdict is None:
            say(f"  the slow link was not found within {FIND_S:g} s")
            if "HostBusy" in kinds:
                say("  other work keeps this machine busy, which explains a slow step as well;")
                say('  when it is quieter: make demo ACTS="links"')
            return 1
        seconds = time.monotonic() - began
        say(f"  ▲ {verdict['reason']} · found in {seconds:.1f} s · perdure diagnose links")
        return 0
    finally:
        job.kill()


def main() -> int:
    """Return 0 where the link was found, or where there can be no such network."""
    if reason := why_not():
        say(f"\nlinks: no slow link is shown, it needs network namespaces: {reason}")
        return 0
    say("\nlinks: four nodes with networks of their own; the link 2->1 is slowed to 100 Mbit/s")
    with Lab(4) as lab:
        return train(lab)


if __name__ == "__main__":
    set_up()
    sys.exit(main())
