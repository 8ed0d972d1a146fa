"""What platforms are like, and what is launched on them."""
