"""What runs inside a rank and is compiled: the recorder, and the NCCL profiler plugin."""
