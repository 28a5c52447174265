"""Settings of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # of `public_names`

from mxnet_stand_in import mxnet_stand_in

_stand_in = mxnet_stand_in()  # a name, which keeps it until the site is built
_stand_in.__enter__()

project = "farandole"
author = "the farandole developers"
extensions = ["myst_parser", "public_names", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = "farandole"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
myst_heading_anchors = 3  # links may name headings, as on GitHub
myst_enable_extensions = ["colon_fence"]
nitpicky = True
# Annotations name types of frameworks, whose own sites are not read; links of Markdown are all checked.
nitpick_ignore_regex = [("py:.*", ".*")]
# Plain code fences hold shell commands and output; a lexer would warn of most.
highlight_language = "none"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
autodoc_inherit_docstrings = False  # those of frameworks' classes describe more than our own
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
