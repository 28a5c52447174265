"""Process of one rank in a test: `rank_process.py FD` reads its task from FD and writes its outcome there."""

import ctypes
import faulthandler
import math
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta

import cloudpickle

from farandole.core.context import Context
from farandole.core.default import use
from farandole.meeting.frames import Deadline, recv_frame, send_frame
from farandole.meeting.rendezvous import from_environment

PR_SET_PDEATHSIG = 1
LARGEST_TASK = 1 << 30


def live(task: bytes) -> bytes:
    """Run the body as a rank; return its pickled outcome: value, error, trace, and time of the failure."""
    failed_at = math.inf
    try:
        path, config, pickled = cloudpickle.loads(task)
        sys.path[:] = path
        body, args = cloudpickle.loads(pickled)
        rendezvous = from_environment()
        with Context(rendezvous, config) as context, use(context):
            try:
                return bytes(cloudpickle.dumps((body(context, *args), None, "", math.inf)))
            except BaseException:
                # Noted before the context ends, because that makes the other ranks fail too.
                failed_at = time.monotonic()
                raise
    except BaseException as error:
        trace, at = traceback.format_exc(), min(failed_at, time.monotonic())
        try:
            return bytes(cloudpickle.dumps((None, error, trace, at)))
        except Exception as why:
            trace += f"(the error itself cannot be pickled: {why})\n"
            return bytes(cloudpickle.dumps((None, RuntimeError(repr(error)), trace, at)))


def main() -> None:
    """Run as the rank that the environment names."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        os.set_inheritable(channel.fileno(), False)
        task = recv_frame(channel, LARGEST_TASK, deadline=Deadline(timedelta(seconds=30)))
        channel.settimeout(30)
        send_frame(channel, live(task))


if __name__ == "__main__":
    main()
