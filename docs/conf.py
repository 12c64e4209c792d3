"""Sphinx's settings for the documentation site: ``make docs``.

The source folder is the repository itself, so that pages are linked to as they are on disk, the
rooms' README files among them. What a page links to and is no page (a script, an example) is
offered as a download.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

ROOT = Path(__file__).parents[1]

project = "fleetlearn"
copyright = "the authors of fleetlearn. Apache License 2.0"
version = release = re.findall(
    r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "*/README.md",
    "device_sdk/web/README.md",
    "device_sdk/kotlin/README.md",
    "docs/*.md",
    "docs/*/*.md",
    "protocol/*.md",
    "protocol/*/*.md",
]
# Folders with thousands of files in which Sphinx need not look.
exclude_patterns = [".*", "build", "dist", "device_sdk/web/node_modules", "tests", "**/__pycache__"]

highlight_language = "none"  # what a page does not name is shown as it is

myst_heading_anchors = 5

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# By their names: what NumPy takes for an array, written out, is five lines.
autodoc_type_aliases = {name: name for name in ("ArrayLike", "Batch", "Vector")}
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"fleetlearn {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["front"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
LISTED = re.compile(r"^- \[([^\]]+)\]\(([\w./-]+)\.md\)", re.MULTILINE)


def add_table_of_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Make the pages that an index lists the ones below it in the site's side bar.

    So each index is plain Markdown, and a new page is entered in one place.
    """
    if page.endswith("/index"):
        folder = posixpath.dirname(page)
        rows = [
            f"{title} </{posixpath.normpath(f'{folder}/{name}')}>"
            for title, name in LISTED.findall(source[0])
        ]
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *rows, "```\n"])


def read_arguments(
    _: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Show what a docstring lists under ``Args:`` as a list.

    Sphinx's own extension for that would also take an attribute's "Seconds: ..." for a type.
    """
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines).lines()
    elif lines and lines[0].startswith("Alias for field number"):
        lines.clear()  # what Python itself says of a named tuple's field


def plain_signature(
    _: Sphinx,
    what: str,
    _name: str,
    of: object,
    _options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str, str | None] | None:
    """Leave out the signature of classes that are nothing but fields: each field has a line of its
    own.

    In others, show aliases by their names alone.
    """
    if what == "class" and (getattr(of, "__struct_fields__", None) or getattr(of, "_fields", None)):
        return "", None
    if not signature:
        return None
    return ALIAS.sub(r"\1", signature), returned and ALIAS.sub(r"\1", returned)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_table_of_contents)
    app.connect("autodoc-process-docstring", read_arguments)
    app.connect("autodoc-process-signature", plain_signature)
