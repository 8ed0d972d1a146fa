"""Holds a node's ranks: the torch-free process that starts and reaps them, and its warm image."""
