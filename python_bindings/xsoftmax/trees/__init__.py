"""Label trees, and losses over label trees."""
