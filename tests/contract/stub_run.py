"""`perdure run` with the stand-in agent: `python stub_run.py HOME NAME [RANK'S ARGS...]`.

STUB_NODES is the number of nodes, which share two ranks; STUB_LEFT_S and
STUB_STOPPED_S replace the supervisor's `LEFT_S` and `_STOPPED_S`.
"""

import os
import sys
from pathlib import Path

from perdure.model.errors import PerdureError
from perdure.model.job import JobSpec, RestartConfig
from perdure.service import supervisor
from perdure.service.processes import part_command


def command(*words: str) -> list[str]:
    if words[0] == "agent":
        return [sys.executable, str(Path(__file__).with_name("stub_agent.py")), *words[1:]]
    return part_command(*words)


def show(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    nodes = int(os.environ.get("STUB_NODES", "1"))
    supervisor.LEFT_S = float(os.environ.get("STUB_LEFT_S", supervisor.LEFT_S))
    supervisor._STOPPED_S = float(os.environ.get("STUB_STOPPED_S", supervisor._STOPPED_S))
    spec = JobSpec(
        name=sys.argv[2],
        script="x",
        args=tuple(sys.argv[3:]),
        nodes=nodes,
        nproc=2 // nodes,
        restart=RestartConfig(grace_s=0.1),
    )
    try:
        sys.exit(supervisor.run(spec, home=sys.argv[1], on_line=show, command=command))
    except PerdureError as error:
        print(f"{type(error).__name__}: {error.message}\nhint: {error.hint}", flush=True)
        sys.exit(error.exit_code)
