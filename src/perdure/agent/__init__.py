"""The node agent's state machine: orders and facts in, requests out."""
