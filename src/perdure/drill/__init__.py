"""Faults made on purpose to a copy of a user's own job, one after another, and their outcome."""
