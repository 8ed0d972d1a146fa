"""The controller as a process: journal, inbox, and the loop around `perdure.control`."""
