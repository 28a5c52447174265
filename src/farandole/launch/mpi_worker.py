"""Worker for one rank below mpirun, started as `python -m farandole.launch.mpi_worker`: receives its call and makes it.

The launcher's addresses and the job's secret are in variables, which mpirun passes on, never in arguments."""

import faulthandler
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

from farandole.config import Config
from farandole.errors import AuthenticationError, ConfigError, RendezvousError
from farandole.launch.channel import WorkerFailure
from farandole.launch.worker import flush_output, run_call
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, recv_frame, send_frame
from farandole.other_launchers import LAUNCHERS

ADDRESSES, SECRET = "FARANDOLE_CALL_ADDRESSES", "FARANDOLE_CALL_SECRET"
LARGEST_CALL = 1 << 40  # bytes; the sender has proved the secret
AT_ONE_ADDRESS = timedelta(seconds=5)
# The rank's variables of launchers of MPI, and of launchers with PMIx.
_RANKS = tuple(dict.fromkeys(row.rank for row in LAUNCHERS if row.mpi or not row.size))


def main() -> int:
    """Make the call of this process's rank; return the exit code for mpirun."""
    faulthandler.enable()
    with _connected(rank_of(os.environ)) as launcher:
        paths, payload = pickle.loads(recv_frame(launcher, LARGEST_CALL))
        sys.path[:] = paths  # makes the launcher's modules importable here
        outcome = run_call(payload)
        flush_output()
        send_frame(launcher, pickle.dumps(outcome))
    return outcome.code if isinstance(outcome, WorkerFailure) else 0


def rank_of(env: Mapping[str, str]) -> int:
    """Return the rank that mpirun has given this process; raises `ConfigError` when it has given none."""
    for name in _RANKS:
        if env.get(name, "").isdigit():
            return int(env[name])
    raise ConfigError("mpi", f"mpirun has set none of {', '.join(_RANKS)}, so this process does not know its rank")


def _connected(rank: int) -> socket.socket:
    """Connect to the launcher, which listens already, at the first of its addresses that reaches it."""
    addresses, secret = os.environ.pop(ADDRESSES).split(), bytes.fromhex(os.environ.pop(SECRET))
    deadline = Deadline(Config.from_environment().start_timeout)
    problems = []
    for address in addresses:
        limit = deadline if address == addresses[-1] else Deadline(AT_ONE_ADDRESS)
        try:
            return dial(address, secret, me=b"%d" % rank, deadline=limit)[0]
        except (OSError, AuthenticationError) as error:  # from here the address may lead to another host
            problems.append(f"{address}: {error}")
    raise RendezvousError(
        f"rank {rank} does not reach the launcher ({'; '.join(problems)}); name the network with network_interfaces"
    )


if __name__ == "__main__":
    sys.exit(main())
