"""Exchange of bytes between the tasks of srun, through a file in a folder that their hosts share."""

import errno
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.hosted import HostedRendezvous, meet
from farandole.other_launchers import OtherLaunch

LOOK_EVERY = 0.1  # seconds


def meet_by_folder(found: OtherLaunch, config: Config, env: Mapping[str, str]) -> HostedRendezvous:
    """Let the tasks of srun meet through `config.rendezvous_folder`; blocks and raises like `meet`."""
    assert found.size is not None
    exchange = FolderExchange(env, found.size, config.rendezvous_folder)
    return meet(exchange, config, Deadline(config.start_timeout), found)


class FolderExchange:
    """Exchange through a file that only this user can read; `folder` is ~/.farandole by default."""

    def __init__(self, env: Mapping[str, str], size: int, folder: str | None) -> None:
        text = env.get("SLURM_PROCID", "")
        if not text.isascii() or not text.isdigit() or int(text) >= size:
            raise ConfigError("SLURM_PROCID", f"must be a task's number below {size}, got {text!r}")
        self.rank, self.size = int(text), size
        self._folder = Path(folder) if folder else Path.home() / ".farandole"
        # Slurm reuses a job's number only after a long time, and counts the restarts of a job. Clusters may share the
        # folder.
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        words = [*filter(None, [env.get("SLURM_CLUSTER_NAME")]), *(env.get(name, "0") for name in names)]
        self._path = self._folder / "-".join(["slurm", *words])

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks up to `deadline`, then raises `RendezvousError`."""
        if self.rank == 0:
            self._write(payload)
            return payload
        while True:
            try:
                return self._read()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):  # NFS: stale, if rank 0 has just replaced the file
                    raise RendezvousError(f"{self._path} cannot be read: {error.strerror}") from error
            try:
                time.sleep(min(LOOK_EVERY, deadline.remaining()))
            except TimeoutError as error:
                raise RendezvousError(
                    f"rank 0 did not write {self._path}; if the hosts do not share this folder, name one that they "
                    "share with FARANDOLE_RENDEZVOUS_FOLDER",
                    missing=(0,),
                ) from error

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _write(self, payload: bytes) -> None:
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(payload)
            part.replace(self._path)  # a reader sees all of it or nothing
        except OSError as error:
            raise ConfigError("rendezvous_folder", f"cannot write {error.filename}: {error.strerror}") from error

    def _read(self) -> bytes:
        with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
                raise RendezvousError(f"{self._path} belongs to another user or can be read by others")
            return file.read()
