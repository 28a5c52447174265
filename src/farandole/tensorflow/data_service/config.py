"""The configuration of a data service, which its job writes to a file and training programs read."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypedDict

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.tensorflow.data_service.registry import ComputeClient

PAUSE = 0.2  # seconds between two looks for the file


class PlainConfig(TypedDict):
    """The configuration as JSON has it, with the key in hexadecimal digits."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: str
    timeout: int


@dataclass(frozen=True)
class TfDataServiceConfig:
    """A data service: its numbers of servers, where dispatchers run, and the way to its registry.

    `dispatcher_side` is "compute" or "training". `addresses` are those of the compute service, (host, port), by network
    interface. Who has `key` can use and end the service. `timeout` (seconds) is for servers to register."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes = field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in ("compute", "training"):
            raise ConfigError("dispatcher_side", f"must be 'compute' or 'training', got {self.dispatcher_side!r}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the compute service; does not connect. `verbose` has no meaning."""
        return ComputeClient([address for each in self.addresses.values() for address in each], self.key)

    def to_dict(self) -> PlainConfig:
        """Return the configuration for JSON."""
        return PlainConfig(
            dispatchers=self.dispatchers,
            workers_per_dispatcher=self.workers_per_dispatcher,
            dispatcher_side=self.dispatcher_side,
            addresses=self.addresses,
            key=self.key.hex(),
            timeout=self.timeout,
        )

    @classmethod
    def from_dict(cls, config: PlainConfig) -> Self:
        """Return the configuration that `to_dict` gave; raises `ConfigError` for another dictionary."""
        try:
            return cls(
                dispatchers=int(config["dispatchers"]),
                workers_per_dispatcher=int(config["workers_per_dispatcher"]),
                dispatcher_side=config["dispatcher_side"],
                addresses={
                    name: [(str(host), int(port)) for host, port in each] for name, each in config["addresses"].items()
                },
                key=bytes.fromhex(config["key"]),
                timeout=int(config["timeout"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("config", f"is no configuration of a data service ({error!r}); write it anew") from error

    def write(self, filename: str) -> None:
        """Write the file, whole at once and readable only by its owner, because it has the key."""
        path = Path(filename)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self.to_dict(), file)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, filename: str, wait_for_file_creation: bool = False) -> Self:
        """Read the file; with `wait_for_file_creation` wait for it up to FARANDOLE_START_TIMEOUT.

        Raises `RendezvousError` if it does not come, `ConfigError` for other contents, and `FileNotFoundError`."""
        deadline = Deadline(Config.from_environment().start_timeout)
        while wait_for_file_creation and not Path(filename).exists():
            try:
                time.sleep(min(PAUSE, deadline.remaining()))
            except TimeoutError as error:
                problem = (
                    f"{filename} is not there ({error}); start the compute workers, or raise FARANDOLE_START_TIMEOUT"
                )
                raise RendezvousError(problem) from None
        text = Path(filename).read_text(encoding="utf-8")
        with suppress(json.JSONDecodeError):
            return cls.from_dict(json.loads(text))
        raise ConfigError("config", f"{filename} is not JSON; start the compute workers again, which write it")
