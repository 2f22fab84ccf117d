"""Models that users bring: any `nn.Module`, looked at rather than rewritten."""
