"""What a job says of its world before pods are added to it."""

import json

import pytest

from perdure.launch.kubernetes.scaling import read_fixed
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.model.report import Snapshot

STATUS = Snapshot(
    version=1, job="gpt", state="running", at_s=0.0, started_s=0.0, generation=0, restarts=0,
    step=1, steps_per_s=1.0, world_size=2, depth="supervised", reason="", fixed="supervised: so",
)  # fmt: skip


def told(**changes: object) -> str:
    return json.dumps({**json.loads(encode(STATUS)), **changes})


def test_a_job_says_itself_what_keeps_its_world() -> None:
    assert read_fixed(told(), "gpt", "p") == "supervised: so"
    assert read_fixed(told(fixed=""), "gpt", "p") == ""


def test_an_older_perdure_is_not_a_job_that_does_not_train_yet() -> None:
    older = {key: value for key, value in json.loads(told()).items() if key != "fixed"}
    with pytest.raises(PlatformError, match="runs an older perdure") as error:
        read_fixed(json.dumps(older), "gpt", "p")
    assert "an image of this version" in error.value.hint
    with pytest.raises(PlatformError, match="does not train yet: forming"):
        read_fixed(told(fixed=None, state="forming"), "gpt", "p")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": 3}', "kubectl: gone"])
def test_what_is_no_status_is_named(text: str) -> None:
    with pytest.raises(PlatformError, match="pod p does not say how the job is"):
        read_fixed(text, "gpt", "p")
