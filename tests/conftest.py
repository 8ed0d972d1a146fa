"""Makes `tests` importable from every test: pytest puts this file's parent on the path."""
