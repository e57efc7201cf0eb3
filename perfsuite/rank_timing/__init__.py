"""Workloads that several processes of torch.distributed call together."""
