"""Parts that the two trainers of leak_cnn share: data, network, loss and metrics."""
