"""`perdure init`: what a training script is, what to write for it, and whether that holds."""
