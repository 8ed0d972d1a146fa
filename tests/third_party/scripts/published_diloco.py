"""torchft's train_diloco.py, not touched, made small enough to be watched on two cores.

usage: published_diloco.py PATH_OF_TRAIN_DILOCO LOG_DIR [PAUSE_S]
Its two embeddings of 500 MB, which take no part in the training, become small ones; each loss it
logs takes PAUSE_S; torchdata, which it imports and does not use, is stood in for where it is not
installed. Each synchronization becomes a line of LOG_DIR/group-G.jsonl, with a hash of the outer
parameters and momenta, which have to be the same in all groups.
"""

import hashlib
import importlib.util
import json
import os
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchft import local_sgd

EXAMPLE, LOG_DIR = sys.argv[1], Path(sys.argv[2])
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
GROUP = os.environ["REPLICA_GROUP_ID"]
ROWS_MAX = 64


def make_small() -> None:
    embed, write = nn.Embedding.__init__, SummaryWriter.add_scalar

    def init(self: nn.Embedding, rows: int, *args: Any, **kwargs: Any) -> None:
        embed(self, min(rows, ROWS_MAX), *args, **kwargs)

    def add_scalar(self: Any, tag: str, *args: Any, **kwargs: Any) -> None:
        write(self, tag, *args, **kwargs)
        if tag.endswith("/loss"):
            time.sleep(PAUSE_S)

    nn.Embedding.__init__ = init  # type: ignore[method-assign]
    SummaryWriter.add_scalar = add_scalar
    if importlib.util.find_spec("torchdata") is None:
        module = types.ModuleType("torchdata.stateful_dataloader")
        module.StatefulDataLoader = torch.utils.data.DataLoader  # type: ignore[attr-defined]
        sys.modules["torchdata.stateful_dataloader"] = module


def watch() -> None:
    """Note the outer state of a fragment after each of its synchronizations."""
    fragment = local_sgd._StreamingDiLoCoFragment
    perform = fragment.perform_sync
    log = open(LOG_DIR / f"group-{GROUP}.jsonl", "a", buffering=1)  # noqa: SIM115

    def perform_sync(self: Any) -> bool:
        index = self._manager.current_step()
        committed = perform(self)
        digest = hashlib.sha256()
        for name, kept in self.original_parameters.items():
            digest.update(name.encode() + kept.detach().numpy().tobytes())
        for parameter in self._model_fragment.parameters():
            momentum = self._outer_optimizer.state.get(parameter, {}).get("momentum_buffer")
            digest.update(b"" if momentum is None else momentum.numpy().tobytes())
        row = {"t": time.time(), "step": self._manager.current_step(), "pid": os.getpid()}
        row |= {"n": self._manager.num_participants(), "q": self._manager._quorum_id}
        row |= {"hash": digest.hexdigest()[:16]} if committed else {"failed": index}
        log.write(json.dumps(row) + "\n")
        return committed

    fragment.perform_sync = perform_sync


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_small()
    watch()
    sys.argv = [EXAMPLE]
    runpy.run_path(EXAMPLE, run_name="__main__")
