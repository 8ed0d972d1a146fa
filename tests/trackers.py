"""What experiment trackers show, read as their own libraries read it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEAD = 32768, 7
_FULL, _MIDDLE, _LAST = 1, 3, 4


def read_tensorboard(folder: Path) -> list[tuple[int, str, str | float]]:
    """Return (step, tag, text or number) of all event files, oldest first."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: list[tuple[int, str, str | float]] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                tensor = value.tensor
                shown = tensor.string_val[0].decode() if tensor.string_val else tensor.float_val[0]
                found.append((event.step, value.tag, shown))
    return found


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all offline runs below `folder`, oldest first."""
    rows = []
    for record in read_wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def read_wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of `run-*.wandb`: protobufs in the pieces of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, part = path.read_bytes(), _HEAD, b""
        while at + _HEAD <= len(data):
            if (room := _BLOCK - at % _BLOCK) < _HEAD:
                at += room
                continue
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            part = part if kind in (_MIDDLE, _LAST) else b""
            part += data[at + _HEAD : at + _HEAD + size]
            at += _HEAD + size
            if kind in (_FULL, _LAST):
                record = Record()
                record.ParseFromString(part)
                yield record


def read_mlflow(url: str, run: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """Return a run, and (step, value) of each of its metrics in the order of time."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=url)
    found = client.get_run(run)
    history = {
        name: [(m.step, m.value) for m in client.get_metric_history(run, name)]
        for name in found.data.metrics
    }
    return found, history
