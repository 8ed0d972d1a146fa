"""Experiment trackers, each by its own library, which is imported when it is asked for.

Each is a run of perdure's own beside those that the training script makes: two processes that write
one run overwrite one another in Weights & Biases unless both have asked for its mode `shared`, and
TensorBoard reads one file of a run at a time. MLflow's runs may be written by several processes, so
that one whose id is known (MLFLOW_RUN_ID) is told itself.

A call of `put` returns once the library has taken what it was given, and raises where it has not.
Nothing is kept here for another try: whoever calls remembers what was taken.
"""

import contextlib
import netrc
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from perdure.adapters.exporters import load_library
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.input.plain import make_plain
from perdure.telemetry.marks import Mark

Row = tuple[int, dict[str, float], float]
"""Step (-1: not known), values, job time."""
STEP = "perdure/step"
_WANDB_HOST = "api.wandb.ai"
_METRICS_MAX, _TAGS_MAX = 500, 100
"""Of one request to MLflow, which takes 1 MB: a letter of a name may be six bytes of it."""
MARKS_KEPT = 200
"""Marks that MLflow shows, as tags; the newest."""
_STEP_MAX = 2**53
"""What every tracker can hold; beyond it is no step that anybody has made."""
_NAME_MAX = 250
_LOGIN = re.compile(r"://[^/\s@]+@")
_SECRET_NAME = re.compile(r"KEY|TOKEN|PASSW|SECRET", re.IGNORECASE)
_SECRET_LEAST = 6
_SAID_MAX = 400
_BAD_IN_KEYS = re.compile(r"[^\w.\- /]")
_BAD_IN_PATHS = re.compile(r"\A\.\.|(?<![^/])(?:/|\.\.?(?![^/]))|/\Z")
"""What MLflow refuses of a key, and with it all that comes along: empty parts, `.`, `..`."""


class Place(NamedTuple):
    """Where a job is told, and by which names."""

    target: str
    """Folder, project or URL."""
    job: str
    key: str
    """Tells this run of the job from earlier ones of its name."""
    folder: str
    """For files of the library's own."""
    environ: Mapping[str, str]
    run: str = ""
    """The tracker's id of the run that was told before."""
    times: int = 0
    """How often one was begun before."""


class Tracker(Protocol):
    """A run that is written."""

    run: str
    """Its id, or folder."""

    def put(self, rows: Sequence[Row], marks: Sequence[tuple[int, Mark]]) -> None:
        """Tell numbers by step, and marks with their numbers, from 1.

        Raises:
            PlatformError: they were not taken, or not all of them.
        """

    def close(self, status: str) -> None:
        """Tell no more; `status` is the job's where it has ended, else empty.

        Raises:
            PlatformError: what was told may not be kept.
        """


def open_tracker(kind: str, place: Place) -> Tracker:
    """Return tracker `kind` with its run begun, or taken up again.

    Raises:
        PlatformError: its library is missing, or it does not want the run.
    """
    makers: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[Mlflow]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": Mlflow,
    }
    return makers[kind](place)


def name_folder(folder: str, job: str) -> str:
    """Return where a job is told in TensorBoard's `folder`."""
    return os.path.join(folder, f"perdure-{job}")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Have whatever a library raises be perdure's own error.

    Raises:
        PlatformError: it has raised something. What looks like a login in it is left out.
    """
    try:
        yield
    except PerdureError:
        raise
    except Exception as error:  # Each library has a tree of its own, and lets others' through.
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise PlatformError(_hide(f"{what}: {text[0]}"), hint="is it reached from here?") from error


def _hide(text: str) -> str:
    """Return `text` without logins, and without what the environment has of secrets."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_LEAST and _SECRET_NAME.search(name):
            text = text.replace(value, f"<{name}>")
    return make_plain(_LOGIN.sub("://<login>@", text), _SAID_MAX)


def _list_values(marks: Sequence[tuple[int, Mark]]) -> list[Row]:
    """Return the numbers of marks, by names that say of what."""
    return [
        (
            mark.step,
            {f"perdure/{mark.kind}_{name}": v for name, v in mark.values.items()},
            mark.at_s,
        )
        for _, mark in marks
        if mark.values
    ]


class TensorBoard:
    """An event file, beside those of earlier controllers; TensorBoard reads them one by one."""

    def __init__(self, place: Place) -> None:
        """Begin a file."""
        self._events = load_library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = load_library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensors = load_library("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._shapes = load_library("tensorboard.compat.proto.tensor_shape_pb2", "tensorboard")
        self._text = load_library("tensorboard.plugins.text.metadata", "tensorboard")
        files = load_library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self.run = name_folder(place.target, place.job)
        with _told(f"cannot write {self.run}"):
            os.makedirs(self.run, exist_ok=True)
            self._writer = files.EventFileWriter(self.run)

    def put(self, rows: Sequence[Row], marks: Sequence[tuple[int, Mark]]) -> None:
        """Write them, and have the file written out."""
        with _told(f"cannot write {self.run}"):
            for step, values, at_s in [*rows, *_list_values(marks)]:
                self._add(step, at_s, self._make_scalars(values))
            for _, mark in marks:
                self._add(mark.step, mark.at_s, [self._make_text(mark)])
            self._writer.flush()

    def _add(self, step: int, at_s: float, values: list[Any]) -> None:
        event = self._events.Event(
            wall_time=at_s, step=_bound(step), summary=self._summaries.Summary(value=values)
        )
        self._writer.add_event(event)

    def _make_scalars(self, values: Mapping[str, float]) -> list[Any]:
        make = self._summaries.Summary.Value
        return [
            make(tag=make_plain(name, _NAME_MAX), simple_value=value)
            for name, value in sorted(values.items())
        ]

    def _make_text(self, mark: Mark) -> Any:
        dim = self._shapes.TensorShapeProto.Dim(size=1)
        tensor = self._tensors.TensorProto(
            dtype="DT_STRING",
            string_val=[mark.text.encode()],
            tensor_shape=self._shapes.TensorShapeProto(dim=[dim]),
        )
        tag = f"perdure/{mark.kind}"
        shown = self._text.create_summary_metadata(display_name=tag, description="")
        return self._summaries.Summary.Value(tag=tag, metadata=shown, tensor=tensor)

    def close(self, status: str) -> None:
        """Close the file."""
        with _told(f"cannot write {self.run}"):
            self._writer.close()


class WeightsAndBiases:
    """A run in the group of the script's own.

    With WANDB_MODE=shared and WANDB_RUN_ID, which the script reads as well, it is that run itself.
    """

    def __init__(self, place: Place) -> None:
        """Begin the run, or take it up again where it is kept by a server."""
        self._wandb = load_library("wandb", "wandb")
        environ = place.environ
        mode = environ.get("WANDB_MODE") or ("online" if _knows_key(environ) else "offline")
        own = environ.get("WANDB_RUN_ID", "")
        shared = mode == "shared" and bool(own)
        id_ = own if shared else f"perdure-{place.key}"
        if mode == "offline" and place.times:
            id_ += f"-{place.times}"  # What is offline cannot be taken up again.
        entity, _, project = place.target.rpartition("/")
        settings: dict[str, Any] = {
            "silent": True, "console": "off", "x_disable_stats": True, "save_code": False,
            "disable_git": True, "init_timeout": 30.0,
        }  # fmt: skip
        if shared:
            settings |= {"x_primary": False, "x_label": "perdure", "x_update_finish_state": False}
        more: dict[str, Any] = {} if shared else {"name": place.job, "resume": "allow"}
        if not shared:
            more["group"] = environ.get("WANDB_RUN_GROUP") or place.job
            more["job_type"] = "perdure"
            more["config"] = {"perdure_job": place.job, "script_run_id": own}
        os.makedirs(place.folder, exist_ok=True)
        self._axes: set[str] = set()
        with _told("wandb"), _removing_tries(os.path.join(place.folder, "wandb")):
            self._run = self._wandb.init(
                entity=entity or None, project=project, id=id_, dir=place.folder, mode=mode,
                settings=self._wandb.Settings(**settings), **more,
            )  # fmt: skip
        self.run = id_

    def put(self, rows: Sequence[Row], marks: Sequence[tuple[int, Mark]]) -> None:
        """Hand them to the library, which sends them from a process of its own."""
        with _told("wandb"):
            for step, values, at_s in rows:
                self._log(step, at_s, values)
            for (_, mark), told in zip(marks, _list_marked(marks), strict=True):
                self._log(mark.step, mark.at_s, told)

    def _log(self, step: int, at_s: float, values: Mapping[str, object]) -> None:
        row = {_name_for_wandb(name): value for name, value in values.items()}
        for name in sorted(row.keys() - self._axes):
            self._run.define_metric(name, step_metric=STEP)
            self._axes.add(name)
        axis = {STEP: _bound(step)} if step >= 0 else {}
        self._run.log({**row, **axis, "perdure/time": at_s})

    def close(self, status: str) -> None:
        """Wait until all of it is kept."""
        with _told("wandb"):
            self._run.finish(exit_code=1 if status == "failed" else 0)


def _name_for_wandb(name: str) -> str:
    """Return `name` as Weights & Biases takes it: to it a star stands for other names."""
    return make_plain(name, _NAME_MAX).replace("*", "_") or "_"


@contextlib.contextmanager
def _removing_tries(folder: str) -> Iterator[None]:
    """Have a run that could not be begun leave nothing: it may be tried for a month."""
    known = set(_list_runs(folder))
    try:
        yield
    except BaseException:
        for name in set(_list_runs(folder)) - known:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        raise


def _list_runs(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if name.startswith("run-")]
    return []


def _list_marked(marks: Sequence[tuple[int, Mark]]) -> Iterator[dict[str, object]]:
    """Yield what a row of Weights & Biases has of each mark."""
    for number, mark in marks:
        values = {f"perdure/{mark.kind}_{name}": v for name, v in mark.values.items()}
        told: dict[str, object] = {f"perdure/{mark.kind}": mark.text, "perdure/mark": number}
        yield told | values


def _knows_key(environ: Mapping[str, str]) -> bool:
    """Return whether somebody has logged in from here."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = environ.get("WANDB_BASE_URL", f"https://{_WANDB_HOST}").partition("://")[2]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host.partition("/")[0]) is not None
    return False


class Mlflow:
    """The run of MLFLOW_RUN_ID, or one of perdure's own in the same experiment."""

    def __init__(self, place: Place) -> None:
        """Find the run, or make it.

        A request is not waited for as long as MLflow would, unless its variables say otherwise.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        tracking = load_library("mlflow.tracking", "mlflow-skinny")
        self._entities = load_library("mlflow.entities", "mlflow-skinny")
        self._what = f"mlflow at {place.target}"
        theirs = place.environ.get("MLFLOW_RUN_ID", "")
        self._mine = not theirs
        with _told(self._what):
            self._client = tracking.MlflowClient(tracking_uri=place.target)
            self.run = theirs or place.run or self._find_or_make(place)

    def _find_or_make(self, place: Place) -> str:
        """Return the id of this job's run, which a process that then died may have made."""
        client, environ = self._client, place.environ
        experiment: str = environ.get("MLFLOW_EXPERIMENT_ID", "")
        if not experiment:
            name = environ.get("MLFLOW_EXPERIMENT_NAME") or "perdure"
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
        runs = client.search_runs([experiment], f"tags.`perdure.key` = '{place.key}'")
        if runs:
            return str(runs[0].info.run_id)
        tags = {"perdure.job": place.job, "perdure.key": place.key}
        return str(client.create_run(experiment, run_name=place.job, tags=tags).info.run_id)

    def put(self, rows: Sequence[Row], marks: Sequence[tuple[int, Mark]]) -> None:
        """Send them; marks have tags of their own, of which the newest are kept."""
        entities = self._entities
        metrics = [
            entities.Metric(_make_key(name), value, round(1000 * at_s), _bound(step))
            for step, values, at_s in [*rows, *_list_values(marks)]
            for name, value in values.items()
        ]
        tags = {
            f"perdure.mark.{(number - 1) % MARKS_KEPT:03d}": f"{mark.kind}: {mark.text}"
            for number, mark in marks[-MARKS_KEPT:]
        }
        made = [entities.RunTag(key, text) for key, text in tags.items()]
        with _told(self._what):
            for part in _cut(metrics, _METRICS_MAX):
                self._client.log_batch(self.run, metrics=part)
            for part in _cut(made, _TAGS_MAX):
                self._client.log_batch(self.run, tags=part)

    def close(self, status: str) -> None:
        """End perdure's own run with the job; somebody else's is left as it is."""
        if status and self._mine:
            words = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
            with _told(self._what):
                self._client.set_terminated(self.run, words.get(status, "FINISHED"))


def _make_key(name: str) -> str:
    """Return `name` as MLflow takes it: as a path that cannot be written in another way.

    >>> _make_key("train//loss{a}/"), _make_key("../b/."), _make_key("")
    ('train/_loss_a__', '_/b/_', '_')
    """
    plain = _BAD_IN_KEYS.sub("_", make_plain(name, _NAME_MAX))
    return _BAD_IN_PATHS.sub("_", plain) or "_"


def _bound(step: int) -> int:
    """Return a step that all can hold; 0 where it is not known."""
    return min(max(0, step), _STEP_MAX)


def _cut(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield `values`, so many at a time."""
    rest = list(values)
    for at in range(0, len(rest), size):
        yield rest[at : at + size]


def make_key(job: str, first_s: float) -> str:
    """Return what tells a run of a job, begun at `first_s`, from others everywhere."""
    return sha256(f"{job}@{first_s}".encode()).hexdigest()[:12]
