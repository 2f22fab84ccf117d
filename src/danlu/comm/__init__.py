"""Ranks: their rendezvous, their process groups, the cost of their collectives. Importing this loads no torch."""
