"""The command `python -m farandole.spark.data_service`: TensorFlow's data service as a Spark job."""

import sys
from pathlib import Path

from farandole.config import Config
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.session import run, started_session
from farandole.tensorflow.data_service import compute_worker_fn
from farandole.tensorflow.data_service.command import parse_options, start_service


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run the data service as a Spark job, with as many workers as Spark's default parallelism, until it is shut down.

    The driver runs the registry at the address at which it listens for executors. It writes `configfile`, and removes
    it at the end. Raises what `farandole.spark.run` and `compute_worker_fn` raise."""
    spark = started_session()
    settings, application = Config.from_environment(), application_of(spark)
    workers = application.parallelism()
    host = application.driver_host(settings.interface or "", settings.start_timeout)
    service, config = start_service(dispatchers, dispatcher_side, timeout, workers, host.bind, host.name)
    with service:
        config.write(configfile)
        try:
            run(compute_worker_fn, (config,), num_proc=workers, stdout=sys.stdout, stderr=sys.stderr)
        finally:
            Path(configfile).unlink(missing_ok=True)
    spark.stop()


if __name__ == "__main__":
    options = parse_options("farandole.spark.data_service")
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
