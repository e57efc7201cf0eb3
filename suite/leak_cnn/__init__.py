"""Parts of leak_cnn that both trainers share: data sets, network, loss and metrics."""
