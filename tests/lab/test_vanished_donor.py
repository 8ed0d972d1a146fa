"""The host of a donor vanishes while a rank follows it, without a last packet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.adapters.nats import make_shared_certificate
from tests.lab.network import Lab, why_not
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.slow]
DONOR = """
import json, sys, time
from tests.unit.worker.test_elastic_joining import KEY, Member, order
import tests.unit.worker.test_elastic_joining as joining
host, key = sys.argv[1], sys.stdin.read()
joining.HOST = host
member = Member(step_s=0.1)
member.start()
print(member.address, flush=True)
while True:
    member.donor.open(order(member, key=key))
    time.sleep(0.5)
"""
RANK = """
import json, sys
from perdure.worker.elastic.joining import Follower, Lost
from tests.unit.worker.test_elastic_joining import Model, follow, order
from types import SimpleNamespace
said, key = json.loads(sys.argv[1]), sys.argv[2]
members = [SimpleNamespace(address=address) for address in said]
model = Model()
follower = follow(order(*members, key=key), model)
state, part = follower.take_state()
model.become(state, part.step, part.epoch)
print("follows", len(follower.connections), flush=True)
try:
    while True:
        if follower.take_step([model.flat], 1.0) is not None:
            model.update()
except Lost as error:
    print("lost", error, flush=True)
follower.close()
model = Model()
follower = follow(order(*members, key=key), model)
print("follows", len(follower.connections), flush=True)
"""


def run_in(lab: Lab, node: int, code: str, *args: str, key: str) -> "subprocess.Popen[str]":
    """Run Python code on a node of the lab."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", lab.space(node), sys.executable, "-c", code, *args],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(key)
    process.stdin.close()
    return process


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_rank_leaves_a_donor_whose_host_has_vanished() -> None:
    key = make_shared_certificate()
    running: list[subprocess.Popen[str]] = []
    with Lab(3) as lab:
        try:
            for node in (0, 1):
                running.append(run_in(lab, node, DONOR, lab.addresses[node], key=key))
            donors = list(running)
            said = json.dumps([donor.stdout.readline().strip() for donor in donors])
            rank = run_in(lab, 2, RANK, said, key, key=key)
            running.append(rank)
            assert rank.stdout.readline() == "follows 2\n"
            lab.cut(1)
            assert rank.stdout.readline().startswith("lost donor 1:")
            assert rank.stdout.readline() == "follows 1\n"
            assert rank.wait(PATIENCE_S) == 0
        finally:
            for process in running:
                process.kill()
                with process:  # Closes its pipe.
                    process.wait(PATIENCE_S)
