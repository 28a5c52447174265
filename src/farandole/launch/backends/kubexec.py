"""Remote shell of the pods of Kubeflow's training operator: `kubectl exec`, as its script for Open MPI calls it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from farandole.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kubexec:
    """The `kubectl` of a launcher's pod, and its options after the name of a worker's pod."""

    kubectl: str
    options: tuple[str, ...] = ()

    @classmethod
    def read(cls, script: Path) -> Self:
        """Read the controller's kubexec.sh; raises `ConfigError` when it holds no such command.

        The script itself cannot be used: it gives the program no standard input."""
        try:
            lines = script.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError("OMPI_MCA_plm_rsh_agent", f"cannot read {script}: {error.strerror}") from error
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[1:2] == ["exec"] and "--" in words:
                options = words[2 : words.index("--")]
                return cls(words[0], tuple(word for word in options if "POD_NAME" not in word))
        raise ConfigError("OMPI_MCA_plm_rsh_agent", f"{script} has no line with 'kubectl exec POD -- COMMAND'")

    def words(self, host: str, program: str) -> list[str]:
        """Return the command that runs `program` in the pod `host`."""
        return [self.kubectl, "exec", "-i", host, *self.options, "--", "/bin/sh", "-c", program]
