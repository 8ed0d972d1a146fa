"""Signals to verdicts: hang, early exit, slowness, lost node; and progress worth journaling."""
