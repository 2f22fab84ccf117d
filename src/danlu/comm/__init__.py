"""Ranks: how they meet, which groups they form, what their collectives cost. Importing this loads no torch."""
