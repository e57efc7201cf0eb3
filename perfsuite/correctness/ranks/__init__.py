"""Run sides in several torch.distributed processes, give each rank its inputs, and check all results."""
