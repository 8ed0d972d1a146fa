"""Schedules of a pipeline: what each cell does in which order, and how long a step takes."""
