"""Commands that ask a running job for something."""
