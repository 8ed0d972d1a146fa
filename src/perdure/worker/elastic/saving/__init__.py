"""What outlives a loss: checkpoints on disk, snapshots in memory."""
