"""What a sweep over the ranks' connections costs a node, at the size of a world of 64.

Eight stand-ins for ranks (processes without torch) hold the connections that a node of eight
ranks has in a world of 64 with three process groups: 8 x 63 x 3 = 1,512. Those among the eight
have both ends on the node, as in gloo's full mesh; the others' far ends are held by a ninth
process, "the rest of the world". On one machine the kernel also lists those 1,344 far ends, which
a real node would not have: the figures are that much too high. The sweeps are the agent's, at
1 Hz, with all of them quiet and then with a ring of each group moving data; the cost is the
thread's CPU time.

    python bench/bench_links.py [--seconds 20] [--json FILE]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from sweep import sweep_after_me

RANKS, WORLD, GROUPS = 8, 64, 3

_HOLD = """
import resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = socket.create_server(("127.0.0.1", 0), backlog=4096)
print(server.getsockname()[1], flush=True)
held = []
def take():
    while True:
        held.append(server.accept()[0])
threading.Thread(target=take, daemon=True).start()
def drain(end):
    while end.recv(1 << 20):
        pass
for line in sys.stdin:
    word, *rest = line.split()
    if word == "connect":
        port, count = int(rest[0]), int(rest[1])
        held += [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    elif word == "read":
        for end in held:
            threading.Thread(target=drain, args=(end,), daemon=True).start()
    elif word == "send":
        for end in held[:int(rest[0])]:
            end.sendall(b"x" * int(rest[1]))
    print("done", flush=True)
"""


class Holder:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def do(self, text: str) -> None:
        self.tell(text)
        assert self._read() == "done\n", text


def connect(ranks: list[Holder], rest: Holder) -> None:
    """Each rank to each later one of the node, and to all of the rest of the world."""
    for index, rank in enumerate(ranks):
        for other in ranks[index + 1 :]:
            rank.do(f"connect {other.port} {GROUPS}")
        rank.do(f"connect {rest.port} {GROUPS * (WORLD - RANKS)}")


def measure(reader: object, pids: dict[int, int], seconds: int, before: object) -> dict[str, float]:
    from perdure.adapters.network.links import LinkReader

    assert isinstance(reader, LinkReader)
    costs, sent, sockets = [], [], 0
    for number in range(seconds):
        if before is not None:
            before()  # type: ignore[operator]
        time.sleep(1.0)
        sweep = reader.sweep(1000.0 + number, pids)
        costs.append(sweep.cost_s)
        sent.append(len(sweep.links))
        sockets = sweep.sockets
    return {
        "sockets": sockets,
        "sweep_ms_median": statistics.median(costs) * 1e3,
        "sweep_ms_max": max(costs) * 1e3,
        "core_at_1hz": statistics.fmean(costs),
        "core_at_5hz": statistics.fmean(costs) * 5,
        "us_a_socket": statistics.median(costs) / max(1, sockets) * 1e6,
        "links_sent_median": statistics.median(sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    from perdure.adapters.network.links import LinkReader

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    holders = [Holder() for _ in range(RANKS + 1)]
    ranks, rest = holders[:RANKS], holders[RANKS]
    try:
        connect(ranks, rest)
        pids = {index: holder.process.pid for index, holder in enumerate(ranks)}
        reader = LinkReader(lambda _: {})
        first = reader.sweep(998.0, pids)
        reader.sweep(999.0, pids)
        result = {"first_ms": first.cost_s * 1e3, "cpus": float(os.cpu_count() or 0)}
        quiet = measure(reader, pids, options.seconds, None)
        for holder in holders:
            holder.do("read")

        def move() -> None:  # A ring: each rank sends on one connection of each group.
            for holder in ranks:
                holder.do(f"send {GROUPS} 2000000")

        busy = measure(reader, pids, max(5, options.seconds // 2), move)
        reader.close()
    finally:
        for holder in holders:
            holder.process.kill()
            holder.process.communicate()
    report = {"quiet": quiet, "moving": busy, **result}
    print(json.dumps(report, indent=1))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    sweep_after_me()
    main()
