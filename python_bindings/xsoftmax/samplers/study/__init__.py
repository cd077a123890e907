"""Samplers for comparison. In the studies of docs/experiments, MIDX is closer to the softmax than
these, or as close and faster."""
