"""`perdure trace`."""
