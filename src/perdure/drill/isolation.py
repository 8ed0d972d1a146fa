"""The user's job as a drill runs it: its own checkpoints, bus and names, and nobody is told of it.

All that reaches beyond the job is taken out of its document: where checkpoints go, whose server and
folder it shares, whom alerts reach. Trackers are turned off or to a folder of the drill.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from perdure.drill.planning import SPIN_ACTION_S
from perdure.model.errors import ConfigError
from perdure.model.job import (
    AlertsConfig,
    BusConfig,
    JobSpec,
    MetricsConfig,
    NatsConfig,
    NotifyConfig,
    PreemptionConfig,
    TrackingConfig,
)

TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_MLFLOW_LOG_ARTIFACTS": "0",
}
_KEYS = ("WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY")
"""Without these nothing is sent, even by a script that sets the mode itself."""
_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR")
_CACHES_AT_HOME = (".cache", ".triton", ".nv")


def isolate(spec: JobSpec, name: str, project: Path, copy: Path, scratch: Path) -> JobSpec:
    """Return the job that is run in a copy of `project`, under `name`; `scratch` is the drill's.

    Paths of the project in its arguments and variables are those of the copy.
    """
    inside = re.compile(rf"(?<![\w./-]){re.escape(str(project))}(?![\w.-])")

    def move(text: str) -> str:
        return inside.sub(lambda _: str(copy), text)

    mlflow = dict.fromkeys(_MLFLOW, f"file:{scratch / 'mlruns'}")
    env = {key: move(value) for key, value in spec.env.items()}
    env |= TRACKERS_OFF | mlflow | dict.fromkeys((k for k in _KEYS if k in env), "")
    return structs.replace(
        spec,
        name=name,
        cwd=move(spec.cwd),
        script=move(spec.script),
        args=tuple(move(arg) for arg in spec.args),
        env=env,
        log_dir="",
        tee="all",
        remote=0,
        nodes_max=0,
        detect=structs.replace(
            spec.detect, hang_action_s=spec.detect.hang_action_s or SPIN_ACTION_S
        ),
        checkpoint=structs.replace(spec.checkpoint, url=""),
        nats=NatsConfig(),
        bus=BusConfig(),
        notify=NotifyConfig(),
        preemption=PreemptionConfig(platform="none"),
        alerts=AlertsConfig(),
        metrics=MetricsConfig(),
        tracking=TrackingConfig(),
    )


def isolate_elsewhere(spec: JobSpec, name: str) -> JobSpec:
    """Return the job that is launched to other machines under `name`.

    Its project is the copy that a launch sends; no key of a tracker is among its secrets. Machines
    that it would grow by are as the profile has them.
    """
    project = Path(spec.launch.project)
    secrets = tuple(name for name in spec.launch.secrets if name not in _KEYS)
    return structs.replace(
        isolate(spec, name, project, project, Path()),
        nodes_max=spec.nodes_max,
        launch=structs.replace(spec.launch, secrets=secrets),
    )


def check_drillable(spec: JobSpec) -> None:
    """Refuse a job that cannot be drilled.

    Raises:
        ConfigError: it has replica groups of torchft, or is only observed.
    """
    if spec.groups:
        raise ConfigError(
            "replica groups of torchft are not drilled", hint="perdure inject, on a job that runs"
        )
    if not spec.unordered.saves:
        raise ConfigError(
            "observe = true: nothing would be done about a fault, and nothing rehearsed",
            hint="leave it out of the job file for the drill",
        )


def list_changes(spec: JobSpec, *, elsewhere: bool = False) -> list[str]:
    """Return what is otherwise in a drill than in the user's job, a sentence each.

    `elsewhere` it runs on machines that are its own nodes.
    """
    detect, url = spec.detect, spec.checkpoint.url
    changes = (
        (
            detect.hang_action_s is None,
            f"detect.hang_action_s = {SPIN_ACTION_S:g}: your job file has none, so your job would "
            "leave a rank that spins to the time-out of its process group",
        ),
        (
            bool(url),
            f"checkpoints go to the drill's own folder, and not to {url}, which is not rehearsed",
        ),
        (
            bool(spec.nats.url),
            f"the bus is the drill's own, and not {spec.nats.url}, which is left alone",
        ),
        (
            spec.bus != BusConfig(),
            "ranks wait for the control plane as long as by default (bus.orphan_s)",
        ),
        (
            bool(spec.remote or spec.growth) and not elsewhere,
            "nodes from elsewhere are emulated on this machine, and none come while it trains",
        ),
        (
            spec.alerts != AlertsConfig() or spec.metrics != MetricsConfig(),
            "nobody is alerted, and no metrics are served",
        ),
        (bool(spec.tracking.targets), "no experiment tracker is told"),
    )
    return [text for so, text in changes if so]


def list_writable(environ: Mapping[str, str], spec: JobSpec) -> list[str]:
    """Return the folders outside the drill's own that a script may write in: devices and caches."""
    home = environ.get("HOME") or os.path.expanduser("~")
    named = [value for env in (environ, spec.env) for key in _CACHES if (value := env.get(key))]
    return ["/dev", "/proc", *(os.path.join(home, name) for name in _CACHES_AT_HOME), *named]


def clean_environ(environ: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """Return the environment of a drill's jobs: no keys of trackers, a folder for what is passing.

    Nor what tells of another job, should the drill itself be started from one.
    """
    kept = {
        key: value
        for key, value in environ.items()
        if key not in _KEYS and not key.startswith(("PERDURE_FAILPOINTS", "PERDURE_JOB"))
    }
    return kept | TRACKERS_OFF | {"TMPDIR": str(temporary)}
