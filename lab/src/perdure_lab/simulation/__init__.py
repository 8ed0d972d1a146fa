"""Replays a trace of availability under each policy, event by event."""
