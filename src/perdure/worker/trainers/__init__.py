"""Trainers whose loop is not ours, in the resumable depth. Each module imports its library."""
