"""What the two trainers of ups share: the configuration, the model and its losses."""
