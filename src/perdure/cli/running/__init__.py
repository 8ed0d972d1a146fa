"""`perdure run`: its options, its checks, its job."""
