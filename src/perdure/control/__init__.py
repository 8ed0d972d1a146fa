"""The controller's state machine: `handle(now, event) -> [Action]`."""

from perdure.control.machine import Controller
from perdure.control.memory import Memory
from perdure.control.state import ControllerState

__all__ = ["Controller", "ControllerState", "Memory"]
