"""Stage 3, proving: a draw, the two sides and the float64 truth become a result for each property of a pair.

Begin with `proofs.py` (the list of proofs), `execution.py` (calls one side), `truths.py` (the float64 truth), `rule.py`
(the bound on the error) and `equivalence.py` (compares a side with the truth).
"""
