"""How long nothing is decided when a node is lost, or cut off: three nodes, three servers.

    python bench/bench_failover.py --kills 6
    python bench/bench_failover.py --kills 0 --cuts 3      # needs root: network namespaces
    python bench/bench_failover.py --nodes 2 --kills 6 --cuts 2     # and a shared folder

An elastic job of one rank a node trains meanwhile. Every 50 ms somebody asks for something that has
to be journaled before it is answered (a notice that a device is well); a gap is the time between
two answers. Each kill takes everything of the node that has the lease; each cut takes a node's
cable, and its way to the shared folder.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace
from tests.e2e.failover import MOUNT, NAME, Arbiter, Site
from tests.e2e.harness import Job
from tests.lab.network import Lab, why_not

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import Command, CommandReply, subject_commands
from perdure.model.codec import decode, encode
from perdure.model.errors import RequestError
from perdure.service.jobfiles import load_endpoint
from perdure.service.jobfolders import paths_of

ASK_S, ANSWER_S = 0.05, 0.4
CUT_S, BACK_S = 10.0, 90.0


class Asker:
    """Asks without end; knows when it was answered."""

    def __init__(self, site: Site, device: str) -> None:
        self.site, self.device = site, device
        self.answered: list[float] = [time.monotonic()]

    async def run(self) -> None:
        paths = paths_of(self.site.job.env["PERDURE_HOME"], NAME)
        endpoint = load_endpoint(paths)
        buses = [
            await NatsBus.connect(replace(endpoint, url=url, servers=()), timeout_s=20)
            for url in endpoint.servers
        ]
        try:
            for number in count():
                command = Command(
                    id=f"ask-{number}",
                    kind="notify",
                    args={"kind": "device-ok", "device": self.device, "source": "bench"},
                )
                await asyncio.wait(
                    [asyncio.create_task(self._ask(bus, command)) for bus in buses],
                    timeout=ANSWER_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                await asyncio.sleep(ASK_S)
        finally:
            for bus in buses:
                await bus.close()

    async def _ask(self, bus: NatsBus, command: Command) -> None:
        """Ask by one server; where it is cut off or dead, another one is asked as well."""
        try:
            data = await bus.request(subject_commands(NAME), encode(command), timeout_s=ANSWER_S)
            reply: CommandReply = decode(data, CommandReply)
            assert reply.ok, reply.reason
            self.answered.append(time.monotonic())
        except RequestError:
            await asyncio.sleep(ANSWER_S)

    def longest(self, since_s: float) -> float:
        """Return the longest time without an answer that ended after `since_s`."""
        times = [*sorted(self.answered), time.monotonic()]
        return max(b - a for a, b in pairwise(times) if b >= since_s)


async def wait(condition: Callable[[], object], what: str, timeout_s: float = BACK_S) -> float:
    """Return how long it took; fail after `timeout_s`."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            raise TimeoutError(f"no {what} after {timeout_s:g} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


def find_device(site: Site) -> str:
    """Return the id of some device."""
    devices = json.loads(site.job.cli("map", NAME, "--json").stdout)["devices"]
    return str(devices[0]["device"])


def count_registered(site: Site, node: int) -> int:
    bodies = [entry["body"] for entry in site.journal()]
    return sum(b["type"] == "NodeRegistered" and b["node"] == node for b in bodies)


async def measure_kill(site: Site, asker: Asker) -> dict[str, Any]:
    """Lose the node that has the lease; bring it back."""
    term, node = site.terms()[-1]
    known = count_registered(site, node)
    left = [rank for rank in range(site.nodes) if rank != node]
    at_s = site.kill_node(node)
    await wait(lambda: site.terms()[-1][0] > term, "next controller")
    await wait(lambda: asker.answered[-1] > at_s + 1, "answer")
    await asyncio.sleep(3.0)
    gap_s = asker.longest(at_s)
    rows = [row for rank in left for row in site.rows(rank) if row["at"] > at_s]
    trained_s = (
        min((row["at"] for row in rows if len(row["world"]) < site.nodes), default=at_s) - at_s
    )
    site.gates.open([node])
    await wait(lambda: count_registered(site, node) > known, "node again")
    await asyncio.sleep(5.0)
    return {"what": "kill", "node": node, "gap_s": gap_s, "next_step_s": trained_s}


async def measure_cut(site: Site, asker: Asker, lab: Lab, node: int) -> dict[str, Any]:
    """Pull a node's cable for a while."""
    term, holder = site.terms()[-1]
    at_s = time.monotonic()
    lab.cut(node)
    if site.arbiter is not None:
        site.arbiter.cut(node)
    await asyncio.sleep(CUT_S)
    gap_s = asker.longest(at_s)
    lab.heal()
    if site.arbiter is not None:
        site.arbiter.join(node)
    await asyncio.sleep(6.0)
    after_s = asker.longest(at_s + CUT_S)
    held = "held the lease" if holder == node else "did not hold it"
    return {"what": f"cut, {held}", "node": node, "gap_s": gap_s, "heal_gap_s": after_s,
            "terms": site.terms()[-1][0] > term}  # fmt: skip


@contextlib.contextmanager
def make_site(lab: Lab | None, nodes: int) -> Iterator[Site]:
    jobs: list[Job] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[MOUNT] = str(folder / "shared")

        def start(job: str, *options: str, timeout_s: float) -> Job:
            if lab is not None:
                place = options.index("--placement") + 1
                document = lab.placement()
                if nodes == 2:
                    document["command"] = [*Arbiter.environment(folder), *document["command"]]
                placement = folder / "lab.json"
                placement.write_text(json.dumps(document))
                options = (*options[:place], str(placement), *options[place + 1 :])
            jobs.append(Job(folder, job, *options, timeout_s=3600))
            return jobs[-1]

        try:
            yield Site(start, folder, elastic=True, nodes=nodes)
        finally:
            for job in jobs:
                job.end()


async def measure(kills: int, cuts: int, nodes: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with Lab(nodes) if cuts else contextlib.nullcontext() as lab, make_site(lab, nodes) as site:
        await wait(lambda: all(len(site.rows(rank)) >= 5 for rank in range(nodes)), "steps", 180)
        asker = Asker(site, find_device(site))
        asking = asyncio.create_task(asker.run())
        await asyncio.sleep(5.0)
        began_s = time.monotonic()
        await asyncio.sleep(3.0)
        print(f"longest gap while nothing happens: {asker.longest(began_s):.2f} s", flush=True)
        for number in range(kills or cuts):
            if lab is None:
                found.append(await measure_kill(site, asker))
            else:
                found.append(await measure_cut(site, asker, lab, number % nodes))
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in found[-1].items()},
                  flush=True)  # fmt: skip
            if asking.done():
                asking.result()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        terms = [term for term, _ in site.terms()]
        assert terms == sorted(set(terms)), terms
        site.job.cli("stop", NAME, "--now")
        site.job.process.wait(120)
        ledger = site.job.report()["ledger"]["unattributed"]
        site.check_steps()
        print(f"{len(site.journal())} entries, terms {terms}; unattributed {ledger}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=3)
    args = parser.parse_args()
    if args.cuts and (why := why_not()):
        sys.exit(f"no cuts here: {why}")
    for kills, cuts in ((args.kills, 0), (0, args.cuts)):
        if kills or cuts:
            found = asyncio.run(measure(kills, cuts, args.nodes))
            gaps = sorted(row["gap_s"] for row in found)
            middle = statistics.median(gaps)
            print(f"{len(gaps)} {'kills' if kills else 'cuts'}: without decisions median "
                  f"{middle:.2f} s, at most {gaps[-1]:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
