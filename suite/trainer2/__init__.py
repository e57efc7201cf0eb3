"""Shared parts of the two trainer2 trainers: configuration, shapes and frozen weights."""
