"""Shared parts of the two eigenstate_lm trainers, and generation and evaluation with their weights."""
