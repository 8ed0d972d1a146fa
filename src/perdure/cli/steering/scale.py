"""`perdure scale`: more or fewer pods while a job runs."""

from typing import Annotated

import typer

from perdure.cli.jobs import ElsewhereError, find_job
from perdure.cli.platforms.profiles import here
from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer
from perdure.cli.steering.act import JobName
from perdure.model.errors import ConfigError
from perdure.service.jobfiles import resolve_home


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(min=0, metavar="PODS", help="0 has it save and wait.")],
    as_json: Json = False,
) -> None:
    """Give a job on Kubernetes more or fewer pods while it trains on.

    An elastic job grows up to `nodes_max` and shrinks to `nodes`. Pods that go leave at a step that
    all agree on: nothing is made again.
    """
    try:
        find_job(job)
    except ElsewhereError as elsewhere:
        record = elsewhere.record
    else:
        raise ConfigError(f"job `{job}` is on this machine", hint="perdure join brings others")
    if record.profile.kind != "kubernetes":
        raise ConfigError(f"nothing to scale on a platform of kind {record.profile.kind}")
    from perdure.launch.kubernetes.scaling import scale as scale_pods

    done = scale_pods(record, pods, here(resolve_home()))
    changes = [f"{name} added" for name in done.added] + [f"{name} left" for name in done.removed]
    text = "; ".join([f"{job}: {done.pods} pods, {done.before} before", *changes])
    answer(done, text, as_json=as_json)
