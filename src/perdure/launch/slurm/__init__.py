"""Slurm as a platform: sbatch takes the place of tmux; the job is put back at its walltime.

`batch` is the program on the nodes: it hears Slurm's warning, has the job save and stop, and puts
it back into the queue.

Without `launch.host` the commands run here, on a login node that shares DURABLE_DIR and the
project with the nodes, and the project is used where it is. With it they run on that login node,
one short connection each, and the project is sent there.
"""

from perdure.launch.slurm.client import query_state, run
from perdure.launch.slurm.render import render
from perdure.launch.slurm.submit import check, submit
from perdure.launch.ssh.teardown import SshTeardown

__all__ = ["TEARDOWN", "check", "query_state", "render", "run", "submit"]

TEARDOWN = SshTeardown()
"""The place is the login node's, where the job was sent to."""
