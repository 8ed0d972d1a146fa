"""One door to each foreign library or kernel interface; errors are translated at the door."""
