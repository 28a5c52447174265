"""Generator of docs/reference/config.md, the table of all settings, from `farandole.config.Config`."""

import argparse
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from farandole.config import Config, Setting
from farandole.refusals import IGNORED_VARIABLES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
KINDS = {
    "bytes": "a whole number, alone or with KB, MB, GB, KiB, MiB or GiB",
    "count": "a whole number",
    "duration": "seconds, or a number with us, ms, s, m or h",
    "fabric": "auto, tcp or mpi",
    "flag": "1, true, yes or on; 0, false, no or off",
    "level": "a log level",
    "route": "auto, nccl or host",
    "text": "any text",
}
INTRODUCTION = """# Settings

<!-- Written by tools/config_table.py from farandole.config.Config. -->

A setting has one value per job. An argument (`hvd.init(fusion_threshold=...)`, an option of `farandole run`) wins over
the variable `FARANDOLE_...`, which wins over Horovod's variable, which wins over the default. An unknown name and a
value that cannot be right raise `ConfigError` before anything starts.
"""


def render() -> str:
    """Return the page's text."""
    settings = Config.settings()
    lines = [INTRODUCTION, "| kind | how it is written |", "|---|---|"]
    lines += [f"| {kind} | {text} |" for kind, text in KINDS.items() if any(each.kind == kind for each in settings)]
    lines += ["", "| setting | kind | default | meaning | variables |", "|---|---|---|---|---|"]
    lines += [_row(setting) for setting in settings]
    lines += ["", "## Variables of Horovod's that are not read", "", "Each is named in a warning when it is set.", ""]
    lines += ["| variable | reason |", "|---|---|", *_unread()]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    variables = ", ".join(f"`{name}`" for name in setting.variables)
    return f"| `{setting.name}` | {setting.kind} | {_shown(setting)} | {setting.help} | {variables} |"


def _shown(setting: Setting) -> str:
    default = setting.default
    if isinstance(default, timedelta):
        seconds = default.total_seconds()
        return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{seconds * 1e6:g} us"
    if setting.kind == "flag":
        return "on" if default else "off"
    if setting.kind == "bytes" and isinstance(default, int):
        return _size(default)
    return "none" if default is None else str(default)


def _size(number: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= scale and number % scale == 0:
            return f"{number // scale} {unit}"
    return str(number)


def _unread() -> Iterator[str]:
    for name, reason in sorted(IGNORED_VARIABLES.items()):
        yield f"| `{name}` | {reason} |"


def main() -> int:
    """Write the page; with `--check` write nothing, and return 1 if the page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is out of date")
    arguments = parser.parse_args()
    text = render()
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/config_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
