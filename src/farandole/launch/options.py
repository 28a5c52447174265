"""Options of `farandole run`: farandole's settings, and Horovod's names for them."""

import argparse
import difflib
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.refusals import IGNORED_OPTIONS, REFUSED_OPTIONS
from farandole.settings import Flag, Setting

AUTO = 0  # number of ranks: one for each slot of the hosts, or each usable core of this machine


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors name the option or the command that a misspelled word may stand for."""

    def error(self, message: str) -> NoReturn:
        """Print `message`, with near words, and exit with code 2."""
        known = [flag for action in self._actions for flag in action.option_strings]
        known += [str(choice) for action in self._actions for choice in action.choices or ()]
        found = re.match(r"unrecognized arguments: (-.*)|.*invalid choice: '([^']*)'", message)
        words = " ".join(filter(None, found.groups())).split() if found else []
        near = [match for word in words for match in difflib.get_close_matches(word.partition("=")[0], known, 1, 0.7)]
        super().error(f"{message}; did you mean {' '.join(near)}?" if near else message)


@dataclass(frozen=True, slots=True)
class Alias:
    """An option for a setting of another name."""

    setting: str
    value: str | None = None  # the value of an option that takes none
    unit: str = ""  # appended to the option's value


ALIASES: Mapping[str, Alias] = {
    "--fusion-threshold-mb": Alias("fusion_threshold", unit="MiB"),
    "--timeline-filename": Alias("timeline"),
    "--no-timeline-mark-cycles": Alias("timeline_mark_cycles", "no"),
    "--no-stall-check": Alias("stall_check_disable", "yes"),
    "--stall-check": Alias("stall_check_disable", "no"),
    "--stall-check-warning-time-seconds": Alias("stall_check_time"),
    "--stall-check-shutdown-time-seconds": Alias("stall_shutdown_time"),
    "--no-autotune": Alias("autotune", "no"),
    "--autotune-log-file": Alias("autotune_log"),
    "--autotune-bayes-opt-max-samples": Alias("autotune_max_samples"),
    "--no-hierarchical": Alias("hierarchical", "no"),
    "--no-torch-env": Alias("torch_env", "no"),
    "--network-interface": Alias("interface"),
    "--network-interfaces": Alias("interface"),
}


class Given(argparse.Namespace):
    """The command line of `farandole run`."""

    num_proc: int | None
    hosts: str | None
    hostfile: str | None
    ssh_port: int | None
    ssh_identity_file: str | None
    ssh_command: str
    binding: Literal["none", "cores"]
    output_filename: str | None
    timestamp: bool
    output_filter: Sequence[int] | None  # ranks
    max_restarts: int
    verbose: bool
    check_build: bool
    min_num_proc: int | None
    max_num_proc: int | None
    slots_per_host: int | None
    reset_limit: int | None
    cooldown_range: list[float] | None
    discovery_script: str | None
    mpi: bool
    gloo: bool
    mpi_args: str | None
    binding_args: str | None
    tcp: bool
    command: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, str] = {}  # by the setting's name, in the form of its environment variable
        self.ignored: list[str] = []  # a sentence for each ignored option
        self.mpi_in_file = False


def add_setting_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of `Config`, in groups by topic, and Horovod's names for some of them."""
    settings = {setting.name: setting for setting in Config.settings()}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings.values():
        if setting.topic not in groups:
            groups[setting.topic] = parser.add_argument_group(setting.topic)
        flag = f"--{setting.name.replace('_', '-')}"
        alias = Alias(setting.name, "yes" if isinstance(setting.kind, Flag) else None)
        _add_setting(groups[setting.topic], flag, setting, alias)
    for flag, alias in ALIASES.items():
        _add_setting(groups[settings[alias.setting].topic], flag, settings[alias.setting], alias, hidden=True)


def add_ssh_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ssh, as a group."""
    ssh = parser.add_argument_group("ssh", "to hosts other than this machine; ~/.ssh/config applies")
    ssh.add_argument("-p", "--ssh-port", type=positive_count, metavar="PORT", help="port of the hosts' ssh servers")
    ssh.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key")
    ssh.add_argument(
        "--ssh-command", type=_command, default="ssh", metavar="COMMAND", help="ssh, with options of your own"
    )


def whole_number(text: str, least: int = 0) -> int:
    """Read a whole number of at least `least`; raises argparse's error for anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}")
    return int(text)


def positive_count(text: str) -> int:
    """Read a whole number of at least 1; raises argparse's error for anything else."""
    return whole_number(text, 1)


MOST_RANKS = 1 << 20  # in a list of them


def rank_count(text: str) -> int:
    """Read a number of ranks; "auto" is `AUTO`. Raises argparse's error for anything else."""
    return AUTO if text == "auto" else positive_count(text)


def ranks_named(text: str) -> Sequence[int]:
    """Read a list of ranks, such as "rank0" or "0,4-7"; raises argparse's error for anything else."""
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:rank)?([0-9]+)(?:-([0-9]+))?", part.strip(), re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if not first <= last < MOST_RANKS:
            raise argparse.ArgumentTypeError(f"must be ranks, as in rank0 or 0,4-7, got {text!r}")
        ranks += range(first, last + 1)
    return ranks


def shell_words(text: str) -> str:
    """Return `text` if a shell could split it into words; raises argparse's error for unbalanced quotes."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"cannot be split into words ({error}): {text}") from error
    return text


def _command(text: str) -> str:
    """Return `text` if it is a command; raises argparse's error for an empty one, and like `shell_words`."""
    if not shlex.split(shell_words(text)):
        raise argparse.ArgumentTypeError("is empty; name a program, or leave the option out for ssh")
    return text


def add_horovod_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Accept horovodrun's options that have no effect, and refuse others, with the reason; leave out those in `but`."""
    for table, action in ((IGNORED_OPTIONS, Ignore), (REFUSED_OPTIONS, _Refuse)):
        for foreign in table:
            flags = [flag for flag in foreign.flags if flag not in but]
            if flags:
                parser.add_argument(*flags, action=action, why=foreign.why, nargs=foreign.values)


def _add_setting(
    group: argparse._ArgumentGroup, flag: str, setting: Setting, alias: Alias, *, hidden: bool = False
) -> None:
    default = "" if setting.default is None else f" (default: {setting.kind.show(setting.default)})"
    group.add_argument(
        flag,
        action=SetSetting,
        setting=setting,
        alias=alias,
        nargs=None if alias.value is None else 0,
        metavar=setting.kind.name.upper(),
        help=argparse.SUPPRESS if hidden else f"{setting.help}{default}".replace("%", "%%"),
    )


class GivenAction(argparse.Action, ABC):
    """Option whose values change `Given`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(namespace, Given) and option_string is not None
        self.take(parser, namespace, values, option_string)

    @abstractmethod
    def take(self, parser: argparse.ArgumentParser, given: Given, values: object, option: str) -> None:
        """Take the option `option` with its values."""


class SetSetting(GivenAction):
    """Option of a setting, which it stores in `Given.settings`."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        setting: Setting,
        alias: Alias,
        nargs: int | None,
        metavar: str,
        help: str,
    ) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, metavar=metavar, help=help)
        self.setting, self._alias = setting, alias

    def take(self, parser: argparse.ArgumentParser, given: Given, values: object, option: str) -> None:
        """Store the value; a wrong one ends the command."""
        text = f"{values}{self._alias.unit}" if self._alias.value is None else self._alias.value
        try:
            value = self.setting.parse(text, option)
        except ConfigError as error:
            parser.error(str(error))
        given.settings[self.setting.name] = self.setting.spell(value)


class Foreign(GivenAction):
    """Option of horovodrun that farandole does not have, for the reason `why`."""

    def __init__(self, option_strings: Sequence[str], dest: str, why: str, nargs: int) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=argparse.SUPPRESS)
        self.why = why


class Ignore(Foreign):
    """Option that is accepted, and named in a warning."""

    def take(self, parser: argparse.ArgumentParser, given: Given, values: object, option: str) -> None:
        """Note the sentence of the warning."""
        given.ignored.append(f"{option} has no effect: {self.why}")


class _Refuse(Foreign):
    def take(self, parser: argparse.ArgumentParser, given: Given, values: object, option: str) -> NoReturn:
        """End the command with the reason."""
        parser.error(f"{option} is not supported: {self.why}")
