"""Traces of availability: nouns, one reader for all formats, and what may be done to a trace."""

from perdure_lab.traces.formats import FORMATS, find_format, read_trace
from perdure_lab.traces.nouns import (
    AvailabilityTrace,
    Change,
    Departure,
    Interval,
    Stay,
    TraceNode,
    list_changes,
    list_intervals,
)

__all__ = [
    "FORMATS",
    "AvailabilityTrace",
    "Change",
    "Departure",
    "Interval",
    "Stay",
    "TraceNode",
    "find_format",
    "list_changes",
    "list_intervals",
    "read_trace",
]
