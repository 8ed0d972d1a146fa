"""`perdure scale`: more or fewer pods while a job runs."""

from typing import Annotated

import typer

from perdure.cli.jobs import find_launched
from perdure.cli.platforms.profiles import here
from perdure.cli.speech.say import JobName, Json, answer
from perdure.model.errors import ConfigError


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(min=0, metavar="PODS", help="0 has it save and wait.")],
    as_json: Json = False,
) -> None:
    """Give a job on Kubernetes more or fewer pods while it trains on.

    An elastic job grows up to `nodes_max` and shrinks to `nodes`. Pods that go leave at a step that
    all agree on: nothing is made again.
    """
    record = find_launched(job, "perdure join brings others")
    if record.profile.kind != "kubernetes":
        raise ConfigError(f"nothing to scale on a platform of kind {record.profile.kind}")
    from perdure.launch.kubernetes.scaling import scale as scale_pods

    done = scale_pods(record, pods, here())
    changes = [f"{name} added" for name in done.added] + [f"{name} left" for name in done.removed]
    answer(
        done,
        "; ".join([f"{job}: {done.pods} pods, {done.before} before", *changes]),
        as_json=as_json,
    )
