"""Worlds for a number of devices: candidates, their cost, and what moves between them."""
