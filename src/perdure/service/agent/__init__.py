"""A node's agent as a process: the event loop around `perdure.agent`."""
