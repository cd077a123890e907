"""Tools to choose, check, run and export losses."""
