"""Generator of docs/reference/config.md, the table of all settings, from `farandole.config.Config`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from farandole.config import Config
from farandole.refusals import IGNORED_VARIABLES
from farandole.settings import Setting

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
INTRODUCTION = """# Settings

<!-- Written by tools/config_table.py from farandole.config.Config. -->

A setting has one value per job. An argument (`hvd.init(config=farandole.Config.from_environment(autotune=True))`, an
option of `farandole run`) wins over the variable `FARANDOLE_...`, which wins over Horovod's variable, which wins over
the default. An argument with an unknown name, and a value that cannot be right, raise `ConfigError` before anything
starts. A warning names variables that look like misspelled ones.
"""


def render() -> str:
    """Return the page's text."""
    settings = Config.settings()
    lines = [INTRODUCTION, "| kind | how it is written |", "|---|---|"]
    kinds = {each.kind.name: each.kind.written for each in settings}
    lines += [f"| {kind} | {text} |" for kind, text in sorted(kinds.items())]
    lines += ["", "| setting | kind | default | meaning | variables |", "|---|---|---|---|---|"]
    lines += [_row(setting) for setting in settings]
    lines += ["", "## Variables of Horovod's that are not read", "", "Each is named in a warning when it is set.", ""]
    lines += ["| variable | reason |", "|---|---|", *_unread()]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    variables = ", ".join(f"`{name}`" for name in setting.variables)
    default = setting.kind.show(setting.default)
    return f"| `{setting.name}` | {setting.kind.name} | {default} | {setting.help} | {variables} |"


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
