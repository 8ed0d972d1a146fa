"""The controller as a process: journal, inbox, lease, and the loop around `perdure.control`."""
