"""The parts of benchmarks/cuda.py: a module measures one subject."""
