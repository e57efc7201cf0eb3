"""Stage 5, estimating: block log-ratios of several processes become estimates with hierarchical variances. No torch.

Begin with `hierarchical.py`.
"""
