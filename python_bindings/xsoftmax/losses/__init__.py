"""Losses over a class table, and over the vectors of two towers."""
