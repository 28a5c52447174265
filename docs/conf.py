"""Settings of the documentation site; `make docs` builds it."""

project = "farandole"
author = "the farandole developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "farandole"
myst_heading_anchors = 3  # links may name headings, as on GitHub
myst_enable_extensions = ["colon_fence"]
nitpicky = True
# Plain code fences hold shell commands and output; a lexer would warn of most.
highlight_language = "none"
