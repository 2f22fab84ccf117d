"""What outlives a process: training data in token shards, checkpoints, and the stores both are kept in."""
