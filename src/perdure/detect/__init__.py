"""Signals to verdicts: hang, early exit, lost node; and the progress worth journaling."""

from perdure.detect.detector import Detector

__all__ = ["Detector"]
