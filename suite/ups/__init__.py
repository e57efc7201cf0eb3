"""ups: the data sets, the model and the losses of a neural operator on latents of PDE fields."""
