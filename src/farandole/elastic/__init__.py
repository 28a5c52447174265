"""Elastic training, as all bindings share it: states that survive the loss of ranks, and the loop around training.

A binding's `elastic` module has the state for its framework: `farandole.torch.elastic`, and so on."""

from farandole.elastic.handlers import StateHandler
from farandole.elastic.loop import run, run_fn
from farandole.elastic.state import HostsUpdatedInterrupt, ObjectState, State
from farandole.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "StateHandler", "run", "run_fn"]
