"""Proofs: compare the two sides of a pair with the float64 truth on each draw, for each property of the pair.

Begin with `proofs.py` (the list of proofs), `execution.py` (calls one side), `truths.py` (the float64 truth), `rule.py`
(the bound on the error) and `equivalence.py` (compares a side with the truth).
"""
