"""The setting `log_level`, applied to Python's logging."""

import logging
import sys
from collections.abc import Mapping

from farandole.config import LOG_LEVELS, Config

__all__ = ["LEVELS", "show_messages"]

# Python has no level below debug.
LEVELS: Mapping[str, int] = dict(
    zip(LOG_LEVELS, (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL), strict=True)
)


def show_messages(config: Config) -> None:
    """Let this process show the package's messages from `config.log_level` on.

    They go where the program's own logging sends them, or to stderr if it has set up none. At the default level nothing
    is changed: Python shows warnings without it, and the program decides about the rest."""
    if config.log_level == Config().log_level:
        return
    package = logging.getLogger("farandole")
    logging.addLevelName(LEVELS["trace"], "TRACE")
    package.setLevel(LEVELS[config.log_level])
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("farandole: %(message)s"))
        package.addHandler(handler)
