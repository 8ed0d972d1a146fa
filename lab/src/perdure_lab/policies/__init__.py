"""Policies and oracles of a trace, as published, and the throughput that they are judged by."""
