"""Platforms: render a job to data, then submit it."""
