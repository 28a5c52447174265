"""Options of the commands that start a data service."""

import argparse

from farandole.errors import ConfigError
from farandole.meeting.handshake import new_secret
from farandole.tensorflow.data_service.config import TfDataServiceConfig
from farandole.tensorflow.data_service.registry import ComputeService


class Options(argparse.Namespace):
    """The options of a command."""

    configfile: str
    dispatchers: int
    dispatcher_side: str
    timeout: int


def parse_options(program: str) -> Options:
    """Parse the command line of the module `program`; ends the process if it is wrong."""
    parser = argparse.ArgumentParser(f"python -m {program}")
    parser.add_argument("configfile", help="the file to write, by which training programs find the service")
    parser.add_argument("--dispatchers", type=int, default=1, help="one for all training ranks, or as many as these")
    parser.add_argument("--dispatcher-side", choices=("compute", "training"), default="compute", help="who runs them")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for dispatchers and workers to register")
    return parser.parse_args(namespace=Options())


def start_service(
    dispatchers: int, dispatcher_side: str, timeout: int, workers: int, bind: str, name: str = ""
) -> tuple[ComputeService, TfDataServiceConfig]:
    """Start the service of `workers` workers on the address `bind`, which others know as `name`.

    Raises `ConfigError` if the dispatchers cannot have equally many workers."""
    if dispatchers < 1 or workers % dispatchers:
        raise ConfigError("dispatchers", f"must divide the {workers} ranks of the service evenly, got {dispatchers}")
    key = new_secret()
    service = ComputeService(dispatchers, workers // dispatchers, key, host=bind)
    addresses = {"job": [(name or service.address[0], service.address[1])]}
    return service, TfDataServiceConfig(dispatchers, workers // dispatchers, dispatcher_side, addresses, key, timeout)
