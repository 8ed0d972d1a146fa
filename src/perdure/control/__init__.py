"""The controller's state machine: `handle(now, event) -> [Action]`."""
