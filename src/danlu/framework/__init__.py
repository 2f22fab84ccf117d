"""Models, optimiser, precision and the training loop."""
