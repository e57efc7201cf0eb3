"""Prove and time workloads that several torch.distributed processes run together."""
