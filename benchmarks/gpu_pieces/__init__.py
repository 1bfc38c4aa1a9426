"The pieces of benchmarks/gpu.py, a file for each, and what they share: record, clock, steps."
