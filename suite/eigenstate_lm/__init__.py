"""Parts that the two trainers of eigenstate_lm share."""
