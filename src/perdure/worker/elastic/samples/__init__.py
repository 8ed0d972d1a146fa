"""Samples of micro-batches, and loading them before their turn."""
