"""Gradients of a step: copied, reduced, added in one order."""
