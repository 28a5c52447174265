"""Sphinx directive `public-names`: the reference of a module, made from the docstrings of the names in its `__all__`.

A module whose framework is not installed gets a note in place of its names, so that the site can be built without."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from farandole.errors import MissingExtra


def describe(module: ModuleType) -> Iterator[str]:
    """Yield the lines of reStructuredText that describe each public name of `module`."""
    for name in sorted(module.__all__):
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        home = home_of(value) if inspect.isclass(value) else module.__name__
        if home not in (module.__name__, ""):
            yield from (f".. py:class:: {full}", "", f"   The same as :py:class:`{home}.{name}`.", "")
        elif inspect.isclass(value):
            yield from (f".. autoclass:: {full}", "   :members:", "")
        elif callable(value) and hasattr(value, "__name__"):
            yield from (f".. autofunction:: {full}", "")
        elif inspect.ismodule(value):
            yield from (f".. py:data:: {full}", "", f"   The module ``{full}``.", "")
        else:
            text = type(value).__doc__ if type(value).__module__.startswith("farandole") else ""
            shown = [f"   :value: {value!r}"] if isinstance(value, (int, str)) else []
            yield from (f".. py:data:: {full}", *shown, "")
            yield from (f"   {line}" for line in [*to_rst(inspect.cleandoc(text or "").splitlines()), ""])


def home_of(value: type) -> str:
    """Return the module on whose page a class of several public modules is described; "" for other classes."""
    for inner, home in (("farandole.core.", "farandole.numpy"), ("farandole.elastic.", "farandole.elastic")):
        if value.__module__.startswith(inner):
            return home
    return "farandole.errors" if value.__module__ == "farandole.errors" else ""


def to_rst(lines: Sequence[str]) -> list[str]:
    """Return a docstring's lines, in which backticks mark code as in Markdown, as reStructuredText."""
    made: list[str] = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        body = paragraph.splitlines()
        if any(line.startswith(" ") for line in body):  # code, a table, a tree: as it is
            made += ["::", "", *(f"   {line}" for line in body), ""]
        else:
            made += [*(_to_rst(paragraph)).splitlines(), ""]
    return made


def _to_rst(text: str) -> str:
    parts = re.split(r"`([^`]+)`", text)
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"\\ ``{' '.join(part.split())}``\\ "
        else:
            parts[place] = re.sub(r"([\\*|_`])", r"\\\1", part)
    return "".join(parts)


class PublicNames(SphinxDirective):
    """`.. public-names:: module`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the description of the module's names, or a note that a package is missing."""
        name = self.arguments[0]
        try:
            lines = list(describe(importlib.import_module(name)))
        except MissingExtra as missing:
            lines = [".. note::", "", f"   {_to_rst(str(missing))}. This page was built without it."]
        return self.parse_text_to_nodes("\n".join(lines))


def _process(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive, and the docstrings' translation."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}


def missing_from(site: Path, pages: Path) -> Iterator[str]:
    """Yield the public names of the modules on `pages` that the built site does not describe."""
    for page in sorted(pages.glob("*.rst")):
        html = (site / page.with_suffix(".html").relative_to(pages.parents[1])).read_text(encoding="utf-8")
        for module in re.findall(r"^\.\. public-names:: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            try:
                names = importlib.import_module(module).__all__
            except MissingExtra:
                continue
            yield from (f"{module}.{name}" for name in names if f'id="{module}.{name}"' not in html)


if __name__ == "__main__":
    missing = [*missing_from(Path("build/docs"), Path("docs/reference/api"))]
    sys.exit(f"the reference lacks {', '.join(missing)}" if missing else 0)
