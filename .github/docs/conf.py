"""The documentation: hand-written pages, and a reference that is generated from the program."""

import sys
from pathlib import Path

from lora_tool import __version__

sys.path.insert(0, str(Path(__file__).parent))  # `read_off` lies beside this file

project = "lora-tool"
author = "The lora-tool authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "read_off"]
myst_heading_anchors = 3
default_role = "code"  # docstrings are written as Markdown
highlight_language = "bash"
smartquotes = False  # two hyphens of an option stay two
nitpicky = True  # a reference to a missing page or term is an error; types need no link
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 80  # longer ones have a parameter a line

html_theme = "furo"
html_title = f"lora-tool {version}"
html_static_path = ["_static"]
html_extra_path = ["../skills"]
html_css_files = ["code.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_theme_options = {
    "source_repository": "https://github.com/OWNER/lora-tool/",
    "source_branch": "main",
    "source_directory": ".github/docs/",
}
html_show_sphinx = False
html_show_copyright = False
