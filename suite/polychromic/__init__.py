"""Data, model and settings of the trainer polychromic."""
