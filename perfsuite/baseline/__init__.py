"""Accepted figures: the entries of `baselines/<device>.json`, waivers, and priors fitted to all entries.
These modules never import torch.

Begin with `accepted_entries.py` (`Entry`, `Baseline`) and `storage.py` (reads and writes the file).
"""
