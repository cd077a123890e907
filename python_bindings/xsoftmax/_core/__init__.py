"""Internal utilities shared by all parts of the package."""
