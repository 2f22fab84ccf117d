"""What is compiled with `torch.compile`, and how."""
