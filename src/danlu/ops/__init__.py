"""The operators of a transformer, a file a family: parameters, FLOPs, bytes moved, what recompute keeps. No torch."""
