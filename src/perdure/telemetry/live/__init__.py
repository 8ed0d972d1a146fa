"""The live picture: one snapshot of ranks, devices, replica groups, and settings."""
