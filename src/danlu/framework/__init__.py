"""Models, optimizer, precision and the training loop."""
