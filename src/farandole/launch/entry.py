"""Entry points of the commands `farandole` and `horovodrun`."""

from farandole.launch.exit_codes import INTERRUPTED


def farandole() -> int:
    """Run the `farandole` command; return its exit code."""
    try:
        # Importing the launcher takes a while. Ctrl-C meanwhile is no failure to trace.
        from farandole.launch.cli import main

        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def horovodrun() -> int:
    """Run the `horovodrun` command; return its exit code."""
    try:
        # As above.
        from farandole.compat.horovodrun import run_commandline

        return run_commandline()
    except KeyboardInterrupt:
        return INTERRUPTED
