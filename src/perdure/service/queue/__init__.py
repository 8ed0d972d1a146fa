"""A queue of runs as a process: who holds it, what it starts, what it has written down."""
