"""A box with nothing but SSH: rendered, checked, submitted, asked; see `launch.platforms`."""

from perdure.launch.ssh.ask import find_state, run
from perdure.launch.ssh.check import check
from perdure.launch.ssh.render import render
from perdure.launch.ssh.submit import submit

__all__ = ["check", "find_state", "render", "run", "submit"]
