"""Platforms: render a job to data, then submit it.

Before that, `lint` and the platform's own checks say what stands against it. What follows a run
that ended at its time limit is `runs.decide`, for Slurm and notebooks alike.
"""
