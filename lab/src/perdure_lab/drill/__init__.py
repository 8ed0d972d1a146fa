"""A drill on boxes behind ssh."""
