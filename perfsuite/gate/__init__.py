"""Stage 6, deciding: measurements and an accepted entry become a `Verdict` for each workload. Pure functions; no torch.

Begin with `decision.py` (the rule), `estimates.py` (slowdown, speedup and margin) and `stages.py` (when it decides).
"""
