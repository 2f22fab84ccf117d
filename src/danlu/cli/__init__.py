"""The `danlu` command: the only reader of arguments and environment. Loads no torch until a command needs it."""


def main() -> None:
    """Run the command that the arguments name."""
    from danlu.cli.app import main as run_command  # a rank imports this package too, and none of the commands

    run_command()
