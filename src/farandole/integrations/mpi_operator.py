"""Command for the launcher's pod of an MPI job on Kubernetes: `python -m farandole.integrations.mpi_operator`.

It is for jobs that use `mpirun`; `farandole run` finds the job's hosts by itself. Given a command, it waits until all
pods have addresses, and replaces itself with the command. It adds the controller's settings under the variables of Open
MPI 5 to the environment. Without a command, it writes these variables for `eval` in a shell."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from farandole.config import Config
from farandole.errors import ConfigError, HostsError
from farandole.launch.backends.mpi_operator import OperatorJob, prte_variables
from farandole.launch.exit_codes import NOT_FOUND, USAGE_ERROR

__all__ = ["OperatorJob", "main", "prte_variables"]


def main(words: Sequence[str], env: dict[str, str]) -> int:
    """Run the command `words` with `env` and the variables of Open MPI 5; without words, write these variables.

    Replaces this process with the command, and returns an exit code only on errors or without a command."""
    try:
        job = OperatorJob.find(env)
        if job is None:
            raise ConfigError("K_MPI_JOB_ROLE", "this is no launcher's pod of an MPI job; run this command in one")
        added = prte_variables(env)
        if not words:
            sys.stdout.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(added.items())))
            return 0
        job.wait_for_hosts(None, Config.from_environment(env).start_timeout)
    except (ConfigError, HostsError) as error:
        sys.stderr.write(f"farandole: {error}\n")
        return USAGE_ERROR
    program = shutil.which(words[0], path=env.get("PATH"))
    if program is None:
        sys.stderr.write(f"farandole: cannot run {words[0]!r}: it is in no directory of PATH ({env.get('PATH')})\n")
        return NOT_FOUND
    os.execve(program, list(words), env | added)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
