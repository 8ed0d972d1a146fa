"""G19: `perdure run` of an elastic script in shards over two ranks; one of four is lost.

Passes where the others go on as the processes that they are, a new one takes the place of the one
that is lost, and every loss has the bits that it has in a run of one process alone (`exact=True`).
"""

import signal

from tests.gpu.g19_elastic import World
from tests.gpu.jobs import open_jobs
from tests.gpu.kit import Trial

NODES = 4


def run(trial: Trial) -> None:
    with open_jobs(trial, 50.0) as jobs:
        world = World(jobs, NODES, "--shard", "2")
        world.lose(1, signal.SIGKILL)
        world.finish()
