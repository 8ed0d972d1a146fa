"""Checks of texts, bytes, names, files, and values that come from outside."""
