"""One training step of any rank, without its machine: operators, collectives and live memory."""
