"""A trace against a job on several boxes: one is really taken away, and given back."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import needs_sshd, read_json
from tests.e2e.test_elastic_nodes import read
from tests.lab.network import Lab, why_not
from tests.platforms.test_boxes import ELASTIC, Boxes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.serial,
    needs_sshd,
    pytest.mark.timeout(590),
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}"),
]
TRACE = "0,add,a\n0,add,b\n5000,remove,b\n10000,add,b\n"
"""The second of two nodes is lost, and comes back."""
LENGTH_S = "60"


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Boxes]:
    with Lab(2) as lab:
        made = Boxes(lab, tmp_path)
        made.write_job(ELASTIC, "elastic.py")
        (made.laptop.folder / "trace.csv").write_text(TRACE)
        try:
            yield made
        finally:
            made.laptop.disconnect()
            for box in made.boxes:
                box.power_off()


def drive(boxes: Boxes, *words: str, code: int = 0) -> dict[str, Any]:
    """Return the answer of `perdure trace drive` as JSON."""
    process = boxes.laptop.start(
        "trace", "drive", "trace.csv", *words, "--duration", LENGTH_S, "--json"
    )
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, out + err
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


def list_worlds(boxes: Boxes, job: str) -> list[list[int]]:
    """Return the worlds of rank 0, one after another."""
    found: list[list[int]] = []
    for row in read(boxes.find_trail(0, job, 0).parent, 0):
        if row["world"] not in found[-1:]:
            found.append(row["world"])
    return found


def test_a_box_is_taken_away_and_given_back_at_the_traces_instants(boxes: Boxes) -> None:
    dry = drive(boxes, "job.toml", "--on", "box", "--dry-run")
    assert [(n["number"], n["machine"], bool(n["stays"])) for n in dry["nodes"]] == [
        (0, "box1", True), (1, "box2", False),
    ]  # fmt: skip
    assert [act[:3] for act in dry["acts"]] == [[5.0, "leave", [1]], [10.0, "come", [1]]]
    assert not (boxes.boxes[0].home / "perdure").exists(), "a dry run sends nothing"

    told = drive(boxes, "job.toml", "--on", "box", "--notice", "3")
    job = told["job"]
    assert (told["complete"], told["ended"], told["trouble"]) == (True, "", "")
    (row,) = told["systems"]
    assert (row["losses"], row["joins"]) == (1, 1)
    assert sum(row["ledger"].values()) == pytest.approx(1.0)
    assert 0.2 < row["fraction_of_u1"] <= 1.1
    first, alone, *back = list_worlds(boxes, job)
    assert (first, alone, len(back[-1])) == ([0, 1], [0], 2)
    start = read_json(boxes.boxes[1].home / "perdure" / f"{job}+box2" / "launch" / "start.json")
    assert start["attempt"] == 2
    (notice,) = boxes.find_events(job, "PreemptionNoticed")
    assert (notice["node"], notice["source"]) == (1, "trace")
    states = boxes.laptop.ask("status", job)["boxes"]
    assert {state["state"] for state in states} == {"ended"}
    for box in boxes.boxes:
        left = [p.cmdline() for p in box.find_processes() if job in " ".join(p.cmdline())]
        assert left == []


def test_a_job_that_runs_on_boxes_goes_on_with_all_of_them_when_its_drive_is_ended(
    boxes: Boxes,
) -> None:
    boxes.laptop.cli("launch", "job.toml", "--on", "box")
    mine = boxes.find_trail(0, "elastic", 0).parent
    wait_until(lambda: len(read(mine, 0)) >= 10, "training on both")
    asked = drive(boxes, "elastic", code=4)
    assert "name was not typed" in asked["error"]
    (boxes.laptop.folder / "trace.csv").write_text(TRACE[: TRACE.index("10000")])
    with boxes.laptop.start("trace", "drive", "trace.csv", "elastic", "--yes", "--duration", "600",
                            "--json") as driving:  # fmt: skip
        wait_until(lambda: read(mine, 0)[-1]["world"] == [0], "the loss of the second")
        driving.terminate()
        out, err = driving.communicate(timeout=150)
    assert driving.returncode == 0, out + err
    told = json.loads(out)
    assert (told["complete"], told["trouble"]) == (False, "")
    assert [(row["losses"], row["joins"]) for row in told["systems"]] == [(1, 0)]
    wait_until(lambda: len(read(mine, 0)[-1]["world"]) == 2, "both again: it was given back")
    assert list_worlds(boxes, "elastic")[:2] == [[0, 1], [0]]
    (lost,) = boxes.find_events("elastic", "NodeLost")
    assert lost["node"] == 1, "it went without a word"

    every = "0,add,a\n0,add,b\n5000,remove,b\n10000,add,b\n20000,remove,a\n"
    (boxes.laptop.folder / "trace.csv").write_text(every)
    refused = drive(boxes, "elastic", "--dry-run", code=4)
    assert "node 0 (box1) cannot be taken" in refused["error"]
    assert "may be driven: 1" in refused["error"]
    kept = drive(boxes, "elastic", "--dry-run", "--keep")
    assert kept["first"] == [0, 1], "the trace's one node, and the one that stays"

    boxes.boxes[1].power_off()
    gone = drive(boxes, "elastic", "--dry-run", "--keep", code=3)
    assert "box2 did not answer" in gone["error"]
    boxes.boxes[1].start(boot_id=str(uuid.uuid4()))
    gone = drive(boxes, "elastic", "--dry-run", "--keep", code=3)
    assert "box2 is no node of elastic now" in gone["error"]


def test_a_place_without_nodes_to_take_or_that_is_not_reached_is_refused(boxes: Boxes) -> None:
    refused = drive(boxes, "job.toml", "--on", "box", "--host", "box1", code=2)
    assert "is on one box" in refused["error"]
    refused = drive(boxes, "job.toml", "--on", "box", "--host", "box1,nobody", code=3)
    assert "nobody did not answer" in refused["error"]
    refused = drive(boxes, "job.toml", "--on", "kaggle", code=2)
    assert "not driven" in refused["error"]
    refused = drive(boxes, "job.toml", "--on", "nowhere", code=2)
    assert "no profile `nowhere`" in refused["error"]
