"""Stages, collectives, links, and hosts that are slower than their peers."""
