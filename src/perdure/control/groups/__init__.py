"""Torchft jobs: replica groups that fail, restart and heal on their own."""
