"""Signals in, verdicts out."""
