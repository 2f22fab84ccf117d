"""The operators that run: reference in plain torch, implementations for a kind of device, how they may be sharded."""
