"""Re-formation in place: the world goes on without the ranks that it lost."""
