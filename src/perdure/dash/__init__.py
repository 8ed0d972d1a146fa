"""Screens: a Snapshot or a Report in, text or a page out."""
