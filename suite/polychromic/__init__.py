"""Data, models and configuration of the polychromic trainer."""
