"""The gate's rule: measurements and an accepted entry become a `Verdict` for each workload. Pure functions that never
import torch.

Begin with `decision.py` (the rule), `estimates.py` (slowdown, speedup and margin), `stages.py` (after how many
processes it decides), `planning.py` (how many processes to time at first) and `exit_codes.py`.
"""
