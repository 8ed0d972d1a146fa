"""Shapes and intervals: nodes to a world, costs to a checkpoint interval."""
