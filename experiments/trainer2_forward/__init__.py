"""Variants of trainer2's forward pass in bfloat16, timed against its matrix products and attention alone."""
