"""Block-scaled fp8 for the matrix products of layers and experts."""
