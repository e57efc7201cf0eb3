"""What the two leak_cnn trainers share: shapes, names, first weights, the forward's parts and the loss."""
