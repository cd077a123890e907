"""The parts of benchmarks/cuda.py: each module measures one subject."""
