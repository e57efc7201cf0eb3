"""check and measure: the pair's items from Python, for notebooks."""
