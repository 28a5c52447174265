"""The setting `log_level`, applied to Python's logging."""

import logging
import sys
from collections.abc import Mapping

from farandole.config import LOG_LEVELS, Config

# Python has no level below debug.
LEVELS: Mapping[str, int] = dict(
    zip(LOG_LEVELS, (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL), strict=True)
)


def show_messages(config: Config) -> None:
    """Set the level of the package's logger to `config.log_level`.

    Messages go to the handlers of the program's own logging, or to stderr if it has none. The default level changes
    nothing: Python shows warnings anyway, and the program decides about the rest."""
    if config.log_level == Config().log_level:
        return
    package = logging.getLogger("farandole")
    logging.addLevelName(LEVELS["trace"], "TRACE")
    package.setLevel(LEVELS[config.log_level])
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("farandole: %(message)s"))
        package.addHandler(handler)
