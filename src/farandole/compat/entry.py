"""Entry point of the command `horovodrun`."""

from farandole.launch.entry import run_command


def horovodrun() -> int:
    """Run the `horovodrun` command; return its exit code."""
    return run_command("farandole.compat.horovodrun", "run_commandline")
