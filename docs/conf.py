"""Settings of the documentation site, which scripts/docs.sh builds with Sphinx.

The site loads nothing from the network: the theme brings its fonts and scripts along,
and formulas are MathML, which browsers show by themselves.
"""

import os
import re
import runpy
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml

ROOT = Path(__file__).resolve().parents[1]
VERSION = runpy.run_path(str(ROOT / "gluon_syncbn" / "common" / "version.py"))[
    "__version__"
]

project = "gluon_syncbn"
author = "the gluon_syncbn developers"
copyright = author
version = release = VERSION
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_design",
]
exclude_patterns = ["_build", "requirements.txt"]
nitpicky = True  # a name of this package that leads nowhere is an error
# Names of MXNet and NumPy, and words that describe a parameter, have no pages here.
nitpick_ignore_regex = [
    ("py:.*", r"(mxnet|numpy|nn)\..*"),
    ("py:class", r'([a-z"].*|NDArray|Parameter|ParameterDict|Initializer|SymbolBlock)'),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autosummary_generate = False

highlight_language = "none"  # of blocks that name no language
html_theme = "furo"
html_title = f"gluon_syncbn {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"

# Pages that are files of the repository's root, which GitHub shows too.
ROOT_PAGES = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "design/contributing": "CONTRIBUTING.md",
}


def read_root_pages(app, docname, source):
    """Puts a root file before what the page itself holds; its links are made to fit."""
    if docname not in ROOT_PAGES:
        return
    file = ROOT / ROOT_PAGES[docname]
    app.env.note_dependency(str(file))
    pages = {name: page for page, name in ROOT_PAGES.items()}
    here = Path(app.srcdir, docname).parent

    def fit(link):
        target, anchor = link[1], link[2] or ""
        if not (ROOT / target).exists():
            return link[0]  # of the network, or within the page
        path = f"docs/{pages[target]}.md" if target in pages else target
        return f"]({os.path.relpath(ROOT / path, here)}{anchor})"

    text = re.sub(r"\]\(([^)#]+)(#[^)]*)?\)", fit, file.read_text(encoding="utf-8"))
    source[0] = f"{text}\n{source[0]}"


def visit_math(translator, node):
    """Writes a formula as MathML."""
    inline = node.tagname == "math"
    formula = latex2mathml.tex2mathml(node.astext(), inline=inline)
    translator.body.append(formula if inline else f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", read_root_pages)
    renderer = visit_math, None
    app.add_html_math_renderer("mathml", renderer, renderer)
