"""The `danlu` command: the only reader of arguments and environment. Loads no torch until a command needs it."""

from danlu.cli.app import main

__all__ = ["main"]
