"""Guard of one rank: a small process between launcher and rank, so that no process of the rank outlives its launcher.

`processes.RankProcess` runs this file as a script under `python -I -S`; it imports few modules (15 ms). It has one
thread. So code between fork and exec is safe, and the rank's parent-death signal, which Linux ties to the *thread* that
forked, cannot fire early. The launcher may have any number of threads.

    guard.py CONTROL LAUNCHER_PID STOP_LIMIT CORES FDS LOG COMMAND...

CONTROL is a socket to the launcher. It carries `T<milliseconds>\\n` (SIGTERM, then SIGKILL after that time) inward and
`S<pid>\\n` (forked), `N<errno>\\n` (cannot be executed) or `E<wait status> <monotonic ns>\\n` (ended) outward.
When the launcher is gone, for any reason, or has been stopped (SIGSTOP) for STOP_LIMIT seconds (0: for any time), the
guard kills the rank and all of its descendants. With a LOG it lets them go on when the launcher is gone, appends their
output to that file, and writes the rank's exit code to LOG.end (`survivors.py`).
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for processes that a rank leaves behind when it exits
GIVE_UP = 10.0  # seconds after SIGKILL; a process that survives it is stuck in the kernel


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; do nothing on systems other than Linux."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def children() -> list[int]:
    """Return the children of this process, with those that it has adopted."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        pass  # kernels without CONFIG_PROC_CHILDREN; the slower scan below finds the same
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == me:
                    found.append(int(entry))
    return found


class Guard:
    """Starts one rank, reports its end, and leaves none of its descendants alive."""

    def __init__(self, control: int, launcher: int, stop_limit: float, log: str) -> None:
        self.control = control
        self.launcher = launcher
        self.stop_limit = stop_limit
        self.log = log
        # Own ends to read the pipes: without any, the rank's next line after the launcher's end would kill it.
        self.output = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK) for fd in (1, 2)] if log else []
        self.log_fd = -1  # of `log`, once the launcher is gone
        self.stopped_since: float | None = None  # the time at which the launcher was first found stopped
        self.rank = 0
        self.rank_alive = False
        self.rank_status = 0  # as `waitpid` returns it, once the rank has ended
        self.kill_at: float | None = None
        self.asked_to_end = False
        self.poller = select.poll()
        self.poller.register(control, select.POLLIN)
        self.wakeup, wakeup_in = os.pipe()
        for end in (self.wakeup, wakeup_in):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self.poller.register(self.wakeup, select.POLLIN)
        # A process that the launcher forked may hold its end of `control`: end of file alone does not show its death.
        try:
            self.launcher_fd = os.pidfd_open(launcher)
            self.poller.register(self.launcher_fd, select.POLLIN)
        except (AttributeError, OSError):
            self.launcher_fd = -1  # without pidfd, `watch` compares the parent's id every second

    def send(self, message: str) -> None:
        """Send a message to the launcher; do nothing if it is gone."""
        with contextlib.suppress(OSError):  # the loop is about to notice that the launcher is gone
            os.write(self.control, message.encode())

    def start(self, command: list[str], cores: str, fds: list[int]) -> bool:
        """Fork and exec the rank in a session of its own; return False when the command cannot be executed."""
        failed, failed_in = os.pipe()
        go, go_in = os.pipe()
        try:
            self.rank = os.fork()
        except OSError as error:  # too many processes
            self.send(f"N{error.errno}\n")
            return False
        if self.rank == 0:
            os.close(go_in)
            become_rank(command, cores, go, failed_in)
        # The launcher gets the rank's process id before the rank runs, and needs it if this process is killed.
        self.send(f"S{self.rank}\n")
        with contextlib.suppress(BrokenPipeError):  # the child has failed; the reason follows
            os.write(go_in, b"x")
        for fd in (failed_in, go, go_in):
            os.close(fd)
        # Readers of the rank's output and descriptors must see end of file when the rank ends, so close these copies.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        for fd in (null, *fds):
            os.close(fd)
        reason = os.read(failed, 32)
        os.close(failed)
        if reason:
            os.waitpid(self.rank, 0)
            self.send(f"N{reason.decode()}\n")
            return False
        self.rank_alive = True
        return True

    def watch(self) -> bool:
        """Serve until the rank and all of its descendants are gone; return False if some survive SIGKILL."""
        while True:
            if not self.reap():
                while self.log_fd >= 0 and any(map(self.drain, self.output)):
                    continue
                return True
            now = time.monotonic()
            if self.kill_at is not None and now >= self.kill_at:
                self.signal_all(signal.SIGKILL)
                if now >= self.kill_at + GIVE_UP:
                    return False
            for fd, _ in self.poller.poll(self.milliseconds_to_wait(now)):
                self.handle(fd)
            if self.stop_limit and self.launcher_has_stopped():
                self.end(0.0)
            if self.launcher_fd < 0 and self.log_fd < 0 and os.getppid() != self.launcher:
                self.lose_launcher()

    def launcher_has_stopped(self) -> bool:
        """Return whether all looks of the last `stop_limit` seconds have found the launcher stopped."""
        state = ""
        with contextlib.suppress(OSError), open(f"/proc/{self.launcher}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        now = time.monotonic()
        self.stopped_since = (self.stopped_since or now) if state in ("T", "t") else None
        return self.stopped_since is not None and now - self.stopped_since >= self.stop_limit

    def milliseconds_to_wait(self, now: float) -> float:
        """Return the milliseconds until the next step that needs no event."""
        if self.kill_at is None:
            return 1000.0
        left = self.kill_at - now
        return max(1.0, left * 1000) if left > 0 else 20.0

    def handle(self, fd: int) -> None:
        """Handle the event of `fd`: a request or the end of the launcher, or a signal to this process."""
        if fd == self.control:
            messages = os.read(fd, 4096).split()
            for message in messages:
                self.end(int(message[1:]) / 1000)
            if not messages:
                self.poller.unregister(fd)
                self.lose_launcher()
        elif fd in self.output:
            if not self.drain(fd):
                self.poller.unregister(fd)
        elif fd == self.wakeup:
            arrived = os.read(fd, 4096)
            if signal.SIGTERM in arrived or signal.SIGINT in arrived:
                self.end(LEFTOVER_GRACE)
        else:
            self.poller.unregister(fd)
            self.lose_launcher()

    def lose_launcher(self) -> None:
        """End the rank, or take over its output if it may go on without its launcher."""
        if not self.log or self.asked_to_end:
            self.end(0.0)
        elif self.log_fd < 0:
            path = os.path.expanduser(self.log)
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self.log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError:
                self.log_fd = os.open(os.devnull, os.O_WRONLY)
            for fd in self.output:
                self.poller.register(fd, select.POLLIN)
            if not self.rank_alive:
                self.note_end()

    def note_end(self) -> None:
        """Write how the rank has ended, for a launcher that takes over."""
        code = os.waitstatus_to_exitcode(self.rank_status)
        with contextlib.suppress(OSError):  # the next launcher then counts the rank as lost
            file = os.open(os.path.expanduser(self.log) + ".end", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(file, str(code if code >= 0 else 128 - code).encode())  # as a shell reports it
            os.close(file)

    def drain(self, fd: int) -> bool:
        """Write a chunk that has come from the rank to the log; return False if there is none."""
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):  # the disk is full; the rank must not block on the pipe
            os.write(self.log_fd, chunk)
        return bool(chunk)

    def end(self, grace: float) -> None:
        """Send SIGTERM to the rank (once), and SIGKILL to all after `grace` seconds, or earlier if set before."""
        kill_at = time.monotonic() + grace
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if self.rank_alive and not self.asked_to_end and grace > 0:
            # Only to the rank, which ends its children itself. They get SIGTERM once the rank is gone.
            os.kill(self.rank, signal.SIGTERM)
            os.kill(self.rank, signal.SIGCONT)
        self.asked_to_end = True

    def reap(self) -> bool:
        """Reap dead children; return False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.rank:
                self.rank_alive, self.rank_status = False, status
                self.send(f"E{status} {time.monotonic_ns()}\n")
                # The group's number is not reused while it has members, so this reaches no other process.
                self.signal_all(signal.SIGTERM)
                if self.log_fd >= 0:
                    self.note_end()
                if self.kill_at is None:
                    self.kill_at = time.monotonic() + LEFTOVER_GRACE

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process group and to all children, adopted ones too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.rank, number)
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def become_rank(command: list[str], cores: str, go: int, failed: int) -> None:
    """Become the rank in the child of `Guard.start`; never returns."""
    code = 126
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.read(go, 1):  # the guard died, perhaps before the line above
            os._exit(code)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and exec would inherit that
            signal.signal(number, signal.SIG_DFL)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        os.execvp(command[0], command)
    except OSError as error:
        os.write(failed, str(error.errno).encode())
    finally:
        os._exit(code)


def main(arguments: list[str]) -> int:
    control, launcher, stop_limit = int(arguments[0]), int(arguments[1]), float(arguments[2])
    cores, fds, log, command = arguments[3], arguments[4], arguments[5], arguments[6:]
    os.set_inheritable(control, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(control, launcher, stop_limit, log)
    started = os.getppid() == launcher and guard.start(command, cores, [int(fd) for fd in fds.split(",") if fd])
    return 0 if not started or guard.watch() else 1  # 1: the launcher looks for survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
