"""The node agent's state machine, of the same shape as the controller's."""

from perdure.agent.machine import Agent

__all__ = ["Agent"]
