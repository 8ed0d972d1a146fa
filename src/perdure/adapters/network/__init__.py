"""Connections, interfaces, and links: what the kernel and NCCL tell of them."""
