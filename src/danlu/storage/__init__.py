"""What outlives a process: training data in token shards, and checkpoints."""
