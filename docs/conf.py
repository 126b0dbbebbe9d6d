"""Sphinx builds the documentation site from the Markdown files beside this one: `make docs`, into out/site."""

from __future__ import annotations

import sys
from pathlib import Path

import signalprop

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "signalprop"
author = "the signalprop authors"
copyright = "the signalprop authors, Apache-2.0"
version = release = signalprop.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "commands",
    "docstrings",
    "mathml",
    "pages",
]
exclude_patterns = ["_extensions"]

# Markdown: dollars are formulas, headings down to the third level can be linked to.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings (Google style). What a base class of another library says of itself is left to that library.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # as a list in the class's own words
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"signalprop {version}"
html_math_renderer = "mathml"
html_static_path = ["_extensions/site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f8b", "color-brand-content": "#1f5f8b"},
    "dark_css_variables": {"color-brand-primary": "#7fb8dd", "color-brand-content": "#7fb8dd"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

linkcheck_timeout = 20
linkcheck_anchors = False  # pages that draw themselves with scripts have none to find
