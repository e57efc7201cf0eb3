"""Sides in several processes of torch.distributed: what each rank gets, and whether all of them are right."""
