"""What all ranks do at one step: how they agree on it, and how each carries it out."""
