"""Snapshots and reports to screens: an HTML file, and text for a terminal."""
