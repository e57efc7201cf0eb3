"""Statistics: block log-ratios of several processes become estimates with hierarchical variances. Never imports torch.

Begin with `hierarchical.py` (the estimates) and `blocks.py` (mean and variance of one process).
"""
