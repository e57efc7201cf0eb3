"""Data sets, model, losses and configuration of ups, a neural operator that steps latents of PDE fields in time."""
