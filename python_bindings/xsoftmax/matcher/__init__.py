"""Extreme multi-label classification models."""
