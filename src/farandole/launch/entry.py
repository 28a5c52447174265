"""Entry point of the command `farandole`, and how commands start."""

from importlib import import_module

from farandole.launch.exit_codes import INTERRUPTED


def farandole() -> int:
    """Run the `farandole` command; return its exit code."""
    return run_command("farandole.launch.cli", "main")


def run_command(module: str, function: str) -> int:
    """Run the function of a module, which is imported now, and return the exit code.

    Importing it takes a while: Ctrl-C ends the command quietly meanwhile, as it does later."""
    try:
        code: int = getattr(import_module(module), function)()
    except KeyboardInterrupt:
        return INTERRUPTED
    return code
