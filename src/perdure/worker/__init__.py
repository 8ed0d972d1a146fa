"""What lives inside a rank. The only door to torch, but for the image that ranks come from."""
