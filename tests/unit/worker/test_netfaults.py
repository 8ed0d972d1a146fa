"""Network faults as command lines; the laboratory's tests run them for real."""

import json

import pytest

from perdure.worker.steering.harm import NetworkFaults

LAB = {"PERDURE_LAB": json.dumps({"interface": "eth9", "addresses": ["10.77.0.1", "10.77.0.2"]})}


class Written(NetworkFaults):
    """Writes down what it would run."""

    def __init__(self, environ):
        super().__init__(environ)
        self.lines = []

    def _run(self, *words, check=True):
        self.lines.append(" ".join(words))


def test_without_a_laboratory_the_machines_own_network_is_left_alone():
    faults = Written({})
    assert "docs/lab.md" in faults.find_objection({"to": 0})
    faults.heal()
    assert faults.lines == []


def test_a_node_that_is_not_there_is_refused():
    faults = Written(LAB)
    assert faults.find_objection({"to": 2}) == "there is no node 2"
    assert faults.find_objection({"to": 1}) == faults.find_objection({}) == ""


@pytest.mark.parametrize(
    ("kind", "rate", "queue"),
    [("slow-link", "20mbit", "pfifo limit 1000"), ("drop-link", "40gbit", "blackhole")],
)
def test_one_link_is_a_class_of_its_own_and_the_others_stay_fast(kind, rate, queue):
    faults = Written(LAB)
    faults.strike(kind, {"to": 1, "mbit": 20})
    text = "\n".join(faults.lines)
    assert "match ip dst 10.77.0.2/32 flowid 1:20" in text
    assert "classid 1:10 htb rate 40gbit" in text
    assert f"classid 1:20 htb rate {rate}" in text
    assert faults.lines[-1] == f"tc qdisc replace dev eth9 parent 1:20 {queue}"


def test_without_a_destination_all_that_the_node_sends_is_slow():
    faults = Written(LAB)
    faults.strike("slow-link", {"mbit": 50.0})
    assert "classid 1:10 htb rate 50mbit" in faults.lines[1]
    assert "filter" not in "".join(faults.lines)


def test_a_pulled_cable_and_its_healing():
    faults = Written(LAB)
    faults.strike("link-down", {})
    faults.heal()
    assert faults.lines == [
        "ip link set eth9 down",
        "ip link set eth9 up",
        "tc qdisc del dev eth9 root",
    ]


def test_what_the_tools_say_is_the_error():
    with pytest.raises(OSError, match="no such thing"):
        NetworkFaults({})._run("sh", "-c", "echo no such thing >&2; exit 2")
