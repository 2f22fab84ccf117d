"""Training data: text into token shards, and the order in which a run reads their samples. No torch."""
