"""What both sides of the trainer leak_cnn share."""
