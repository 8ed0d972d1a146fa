"""Gates: bounds on time, CPU, and memory. `make gates` measures them alone on a quiet machine."""
