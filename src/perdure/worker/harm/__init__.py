"""Harm done on purpose, inside a rank: faults, slow stages, a lossy network."""
