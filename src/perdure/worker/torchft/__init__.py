"""What a torchft job's ranks have in them: the Manager's missing parts."""
