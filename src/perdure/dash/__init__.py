"""Snapshots and reports to screens: an HTML file, and text for a terminal."""

from perdure.dash.page import render_html
from perdure.dash.text import render_text

__all__ = ["render_html", "render_text"]
