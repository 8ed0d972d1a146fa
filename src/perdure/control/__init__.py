"""The controller's state machine: `handle(now, event) -> [Action]`."""

from perdure.control.job import JobState
from perdure.control.machine import Controller
from perdure.control.memory import Memory

__all__ = ["Controller", "JobState", "Memory"]
