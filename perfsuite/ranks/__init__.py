"""Run sides in several processes of torch.distributed, give each rank its inputs, and check all results."""
