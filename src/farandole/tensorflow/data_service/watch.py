"""Watch of a process that reads from a data service: it reports a service that ends without having been shut down."""

import logging
import threading

from farandole.errors import RendezvousError
from farandole.tensorflow.data_service.registry import ComputeClient

log = logging.getLogger(__name__)

_watched: set[str] = set()  # addresses of services that a thread of this process waits for


def report_lost_service(client: ComputeClient) -> None:
    """Log an error when the service of `client` is gone before it was shut down; does not block.

    TensorFlow waits for a lost service for an hour, in a call that nothing can interrupt."""
    where = client.addresses[0]
    if where not in _watched:
        _watched.add(where)
        threading.Thread(target=_wait, args=(client, where), name="farandole-data-service", daemon=True).start()


def _wait(client: ComputeClient, where: str) -> None:
    try:
        client.wait_for_shutdown()
    except RendezvousError as error:
        log.error(
            "the data service at %s is gone (%s); TensorFlow waits for it up to an hour: end this program, and look at "
            "the output of the compute workers",
            where,
            error,
        )
    finally:
        _watched.discard(where)
