"""Draws of inputs: a pair and a seed become a `Case`, which names sizes, layouts and values, and then tensors.

Begin with `cases.py` (Hypothesis strategies), `inputs.py` (tensors of a case) and `coverage.py` (planned draws that
together contain every kind of inputs).
"""
