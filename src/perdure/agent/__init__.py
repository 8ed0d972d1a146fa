"""The node agent's state machine, of the same shape as the controller's."""
