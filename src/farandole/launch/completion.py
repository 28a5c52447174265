"""`farandole completion`: scripts by which bash, zsh and fish complete the command, made from its parsers."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name

from farandole.launch.cli import COMMANDS
from farandole.launch.options import CommandParser

# In zsh the function of bash works as it is.
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def run_completion(words: Sequence[str]) -> int:
    """Print the script of the shell in `words`, the arguments of `farandole completion`."""
    shell = completion_parser().parse_args(words).shell
    actions = {name: list(_shown(resolve_name(command.parser)())) for name, command in COMMANDS.items()}
    text = "".join(_fish(actions)) if shell == "fish" else _bash(actions)
    sys.stdout.write(f"{_ZSH if shell == 'zsh' else ''}{text}")
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `farandole completion`."""
    parser = CommandParser(
        prog="farandole completion",
        description="Print a script that completes this command. In ~/.bashrc or ~/.zshrc:\n"
        '  eval "$(farandole completion bash)"\n'
        "For fish: farandole completion fish > ~/.config/fish/completions/farandole.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments that the help shows, those of subcommands as well."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from (option for option in _shown(each) if option.option_strings and option.dest != "help")


def _words(actions: Sequence[argparse.Action]) -> str:
    """Return the options and the values of arguments, as one word of a shell."""
    found = [flag for action in actions for flag in action.option_strings]
    found += [str(value) for action in actions if not action.option_strings for value in action.choices or ()]
    return shlex.quote(" ".join(dict.fromkeys(found)))


def _bash(commands: Mapping[str, Sequence[argparse.Action]]) -> str:
    values = [action for actions in commands.values() for action in actions if action.option_strings and action.choices]
    lines = ["_farandole() {", "  local words", '  case "${COMP_WORDS[1]}" in']
    lines += [f"    {name}) words={_words(actions)} ;;" for name, actions in commands.items()]
    lines += ["  esac", '  case "${COMP_WORDS[COMP_CWORD-1]}" in']
    for action in values:
        words = shlex.quote(" ".join(map(str, action.choices or ())))
        lines.append(f"    {'|'.join(action.option_strings)}) words={words} ;;")
    lines += ["  esac", f'  [ "$COMP_CWORD" = 1 ] && words={shlex.quote(" ".join(commands))}']
    lines += ['  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))', "}"]
    # Without a word of these, bash completes names of files.
    return "\n".join([*lines, "complete -o default -F _farandole farandole", ""])


def _fish(commands: Mapping[str, Sequence[argparse.Action]]) -> Iterator[str]:
    for name, actions in commands.items():
        about = shlex.quote(COMMANDS[name].about)
        yield f"complete -c farandole -n __fish_use_subcommand -f -a {name} -d {about}\n"
        within = f"complete -c farandole -n '__fish_seen_subcommand_from {name}'"
        for action in actions:
            choices = shlex.quote(" ".join(map(str, action.choices or ())))
            flags = "".join(
                f" -{'l' if flag.startswith('--') else 's' if len(flag) == 2 else 'o'} {flag.lstrip('-')}"
                for flag in action.option_strings
            )
            takes = f" -x -a {choices}" if action.choices else " -r" if flags and action.nargs != 0 else ""
            if flags or action.choices:
                yield f"{within}{flags}{takes} -d {shlex.quote((action.help or '').replace('%%', '%'))}\n"
