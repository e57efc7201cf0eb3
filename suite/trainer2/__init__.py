"""Shared parts of the two trainer2 trainers: configuration, frozen weights, checkpoint state and search."""
