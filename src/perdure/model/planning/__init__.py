"""What a world is planned from, and is."""
