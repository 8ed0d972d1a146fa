"""The training side: keeper, zygote, and what lives inside a rank. The only door to torch."""
