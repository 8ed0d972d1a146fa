"""What perdure 0.1 has left: journals of every depth, checkpoints, and the losses that followed.

`tests/written/0.1` was written by real jobs of that version, in each of which a rank was killed;
the jobs with checkpoints were stopped, and `losses` are of runs that were not. Paths and names of
people are made up.
"""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from perdure.model.events import JobSubmitted, JournalEntry
from perdure.model.job import JobSpec
from perdure.service.jobfiles import parse_journal, write_document

DATA = Path(__file__).parent / "written" / "0.1"
DEPTHS = ("supervised", "resumable", "torchft", "elastic", "sharded", "stages")
SAVED = {"resumable": 43, "elastic": 34, "sharded": 34, "stages": 38}
"""Those with a checkpoint -> its step."""


def _unpack(name: str) -> bytes:
    return gzip.decompress((DATA / name).read_bytes())


def read_journal(depth: str) -> list[JournalEntry]:
    """Return every entry."""
    return parse_journal(_unpack(f"{depth}.jsonl.gz").splitlines(keepends=True))


def find_spec(entries: list[JournalEntry]) -> JobSpec:
    first = entries[0].body
    assert isinstance(first, JobSubmitted)
    return first.spec


def lay_down(depth: str, home: Path) -> Path:
    """Make the directory of the job below `home`, as 0.1 has left it; return it."""
    folder = home / "jobs" / depth
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_bytes(_unpack(f"{depth}.jsonl.gz"))
    (folder / "state.json").write_bytes(_unpack(f"{depth}.state.json.gz"))
    write_document(str(folder / "job.json"), find_spec(read_journal(depth)))
    if depth in SAVED:
        with tarfile.open(fileobj=io.BytesIO(_unpack(f"{depth}.tar.gz"))) as tar:
            tar.extractall(folder / "checkpoints", filter="data")
    return folder


def read_losses(depth: str) -> dict[str, dict[str, Any]]:
    """Return rank -> step -> the loss (of an elastic job, one a micro-batch) as hex."""
    told = json.loads(_unpack("losses.json.gz"))
    found: dict[str, dict[str, Any]] = told[depth]
    return found
