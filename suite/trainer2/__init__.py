"""What the two trainer2 trainers share: configuration, shapes and frozen weights."""
