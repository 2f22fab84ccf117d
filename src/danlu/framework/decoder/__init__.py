"""The decoder transformer, written for one device; how it is placed on many."""
