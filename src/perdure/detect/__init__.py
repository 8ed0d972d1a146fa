"""Signals to verdicts: hang, early exit, slowness, lost node; and progress worth journaling."""

from perdure.detect.detector import Detector

__all__ = ["Detector"]
