"""Recorded availability, what policies would make of it, and the same against real processes."""
