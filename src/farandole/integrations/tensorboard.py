"""Curves for TensorBoard: `with EventFile(folder) as events: events.scalars({"loss": 0.3}, step)`."""

# The writer itself is in core, because the Spark estimators, which may not import integrations, write event files too.
from farandole.core.events import EventFile

__all__ = ["EventFile"]
