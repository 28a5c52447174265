"""The command `python -m farandole.tensorflow.data_service.compute_worker`: a rank of a data service.

Any launcher may start it."""

from contextlib import ExitStack
from pathlib import Path

from farandole.core.default import context, init, shutdown
from farandole.core.operations.ops import barrier
from farandole.core.wiring.own_address import own_address
from farandole.meeting.frames import Deadline
from farandole.tensorflow.data_service.command import parse_options, start_service
from farandole.tensorflow.data_service.config import TfDataServiceConfig
from farandole.tensorflow.data_service.servers import compute_worker_fn
from farandole.tensorflow.objects import broadcast_object


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Serve as one rank of the data service until a client shuts it down; all ranks of the job call this.

    Rank 0 runs the registry on the job's interface. It writes `configfile`, and removes it at the end. Raises what
    `compute_worker_fn` raises, and `ConfigError` if the dispatchers do not divide the ranks evenly."""
    init()
    here = context()
    with ExitStack() as closing:
        config: TfDataServiceConfig | None = None
        if here.rank == 0:
            host = own_address(here.rendezvous, here.config, Deadline(here.config.start_timeout))
            service, config = start_service(dispatchers, dispatcher_side, timeout, here.size, host)
            closing.enter_context(service)
            config.write(configfile)
            closing.callback(Path(configfile).unlink, missing_ok=True)
        compute_worker_fn(broadcast_object(config))
        barrier()  # rank 0 answers until all have heard of the shutdown
    shutdown()


if __name__ == "__main__":
    options = parse_options("farandole.tensorflow.data_service.compute_worker")
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
