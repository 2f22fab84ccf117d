"""Custom models: any `nn.Module`, inspected rather than rewritten."""
