"""Stage 2, drawing: a pair and a seed become a `Case`, and a `Case` becomes tensors.

Begin with `cases.py` (Hypothesis strategies), `inputs.py` (tensors of a case) and `coverage.py` (draws that contain
every kind of inputs).
"""
