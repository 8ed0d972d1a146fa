"""`elastic.py` over a fake device, which rank 1 loses once it has committed step 20."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from perdure.worker.elastic import trainer
from perdure.worker.elastic.state.replicated import ReplicatedState

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.fake_communicator import FakeDevice

DEVICE = FakeDevice()
update: Any = ReplicatedState.update


def lose(state: Any, source: Any) -> None:
    update(state, source)
    if os.environ["RANK"] == "1" and state.applied == 20:
        DEVICE.error = "CUDA error: an illegal memory access was encountered"


ReplicatedState.update = lose  # type: ignore[method-assign]
trainer.choose_engine = lambda device: DEVICE.connect  # type: ignore[assignment, return-value]
runpy.run_path(str(Path(__file__).with_name("elastic.py")), run_name="__main__")
