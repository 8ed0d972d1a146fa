"""A rank on its way into a world that trains: its donors, and itself."""
