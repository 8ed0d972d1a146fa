"""What is read of ranks, nodes and links."""
