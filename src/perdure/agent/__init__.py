"""The node agent's state machine: orders and facts in, requests out."""

from perdure.agent.machine import Agent
from perdure.agent.state import NodeIdentity

__all__ = ["Agent", "NodeIdentity"]
