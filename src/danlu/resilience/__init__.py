"""Which rank keeps a run from going on, and why."""
