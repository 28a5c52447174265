"""Metrics for Prometheus: `with serve_metrics(port=9100 + hvd.local_rank()): train()`.

Needs prometheus-client: the extra `prometheus`."""

from collections.abc import Iterator
from contextlib import contextmanager

from farandole.core import default
from farandole.core.context import Context
from farandole.errors import HorovodInternalError, NotInitializedError
from farandole.extras import importing

with importing(__name__):
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

__all__ = ["metrics_text", "serve_metrics"]

# Help texts by the names of `Metrics.read`. Gauges can fall; all others are counters.
_HELP = {
    "operations": "Collectives that this rank has completed.",
    "bytes": "Bytes that this rank has put into collectives.",
    "buckets": "Transfers that the collectives took.",
    "fused": "Share of the collectives that needed no transfer of their own.",
    "agreed_in_lane": "Collectives agreed by the ranks of one host.",
    "agreed_by_number": "Requests to rank 0 by number.",
    "agreed_in_full": "Requests to rank 0 in full.",
    "wait_seconds": "Seconds that threads have waited for collectives.",
    "timeline_dropped": "Events that a timeline had no room for.",
    "fusion_threshold": "Largest bucket of fused tensors, in bytes.",
    "slot_bytes": "Chunk of a shared-memory transfer, in bytes.",
    "link_chunk": "Largest chunk of a transfer between hosts, in bytes.",
    "link_small": "Bytes to a rank that take one step between hosts.",
    "hierarchical": "1 when ranks combine in their host first.",
    "knob_turns": "How often the five were changed.",
}
_GAUGES = frozenset({"fused", "fusion_threshold", "slot_bytes", "link_chunk", "link_small", "hierarchical"})


class _Collector(Collector):
    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        self._follow()
        rank = str(self._context.rank)
        for name, value in self._context.metrics().items():
            kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = kind(f"farandole_{name}", _HELP[name], labels=["rank"])
            family.add_metric([rank], value)
            yield family

    def _follow(self) -> None:
        """Replace a context that has ended by the process's new one, if there is one.

        Another `init` makes one, as does each generation of an elastic job."""
        try:
            self._context.engine.require_alive()
        except HorovodInternalError:
            if default.is_newcomer():
                return  # `context` would block until the other ranks take this one in
            try:
                self._context = default.context()
            except NotInitializedError:
                return  # after `shutdown` the last counts stay


def metrics_text() -> str:
    """Return this rank's metrics in Prometheus' text format; raises `NotInitializedError` before `init()`."""
    return generate_latest(_registry()).decode()


@contextmanager
def serve_metrics(port: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve this rank's metrics at `http://address:port/metrics` within the block; yields the port. 0: any free port.

    After another `init`, and in each generation of an elastic job, the page shows the new counts, which begin at 0, and
    the new rank. Each rank of a host needs its own port. Everybody who can reach the address can read the metrics; by
    default only this host can. Raises `NotInitializedError` before `init()`, and `OSError` if the port is in use."""
    server, thread = start_http_server(port, address, _registry())
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collector(default.context()))
    return registry
