"""What runs inside a rank and is compiled: the recorder, and the NCCL profiler plugin.

Of the recorder, `build` and `status` import no torch; `recorder` is for ranks.
"""
