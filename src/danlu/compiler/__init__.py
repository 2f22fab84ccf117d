"""Graphs: what is compiled, and how."""
