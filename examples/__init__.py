"""Example programs. Run them as files (`python examples/recommend/train.py`) or as modules
(`python -m examples.recommend.train`)."""
