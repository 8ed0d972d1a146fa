"""What a lighthouse knows and decides: who trains together (torchft)."""
