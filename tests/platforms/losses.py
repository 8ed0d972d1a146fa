"""Losses of a job's whole life, read from the curves that its runs left, and their comparison."""

import contextlib
import json
from pathlib import Path

from perdure.service.curves import read_curves


def read_losses(folder: Path) -> dict[int, set[str]]:
    """Return step -> every loss that any run has logged there, exact, as hex."""
    found: dict[int, set[str]] = {}
    for curves in folder.rglob("curves"):
        for bucket in read_curves(str(curves)).curves.get("loss", ()):
            assert bucket.values == 1, "too long a job to be compared step by step"
            found.setdefault(int(bucket.step), set()).add(bucket.last.hex())
        for new in curves.glob("new-*"):  # In which a step that was run again stands twice.
            for line in new.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # Cut short by a kill.
                    for step, values in json.loads(line[17:])["rows"]:
                        if "loss" in values:
                            found.setdefault(step, set()).add(float(values["loss"]).hex())
    return found


def check_equal(results: Path, checkpoints: Path, reference: Path, steps: int) -> set[int]:
    """Compare losses and last weights with the reference's, bit for bit; return the steps found.

    `reference` is the directory of a job that nothing has interrupted.

    A step that was run again after an interruption has to have had the same loss both times.
    """
    expected, found = read_losses(reference), read_losses(results)
    assert sorted(expected) == list(range(steps))
    assert {step: losses for step, losses in found.items() if losses != expected[step]} == {}
    weights = hash_weights(checkpoints, steps)
    assert weights
    assert weights == hash_weights(reference / "checkpoints", steps)
    return set(found)


def hash_weights(checkpoints: Path, step: int) -> dict[str, str]:
    """Return file -> hash of the tensors in the checkpoint of `step`, as they were written."""
    manifest = json.loads((checkpoints / f"step-{step:08d}" / "manifest.json").read_text())
    files = {file["path"]: file["xxh3_128"] for file in manifest["files"]}
    return {path: digest for path, digest in files.items() if path.endswith(".distcp")}
