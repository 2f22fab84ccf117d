"""From a recipe to a run that has ended: check, prepare a folder, start the ranks, follow them. No torch at import."""
