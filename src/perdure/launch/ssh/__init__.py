"""Boxes with nothing but SSH: rendered, checked, submitted, asked; see `launch.platforms`."""

from perdure.launch.platforms import Here
from perdure.launch.ssh import boxes
from perdure.launch.ssh import submit as one
from perdure.launch.ssh.ask import query_state, run
from perdure.launch.ssh.check import check
from perdure.launch.ssh.render import render
from perdure.launch.ssh.teardown import SshTeardown
from perdure.model.platforms.launching import LaunchRecord, Plan

__all__ = ["TEARDOWN", "check", "query_state", "render", "run", "submit"]

TEARDOWN = SshTeardown()


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Start the job of `plan`, on one box or on several; see `launch.platforms`."""
    return boxes.submit(plan, here) if plan.others else one.submit(plan, here)
