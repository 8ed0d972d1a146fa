"""Signals to verdicts: hang, early exit, slowness, lost node; and progress worth journaling."""

from perdure.detect.detector import Detector, Unwatched

__all__ = ["Detector", "Unwatched"]
