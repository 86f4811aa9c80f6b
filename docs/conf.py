"""Settings of the documentation site, which scripts/docs.sh builds with Sphinx.

The site loads nothing from the network: the theme includes its fonts and scripts, and
browsers display formulas, which are MathML, without a library.
"""

import json
import os
import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).resolve().parents[1]
COMPAT = (ROOT / "gluon_syncbn" / "compat.py").read_text(encoding="utf-8")
VERSION = re.search(r'__version__ = "(.*?)"', COMPAT)[1]

project = "gluon_syncbn"
author = "gluon_syncbn maintainers"
copyright = author
version = release = VERSION
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]  # the theme's sidebar with a link to the sources
nitpicky = True  # a link to an unknown name of this package is an error
# Names of MXNet and NumPy, and words that describe a parameter, have no pages here.
nitpick_ignore_regex = [
    ("py:.*", r"(mxnet|numpy|nn|subprocess)\..*"),
    ("py:class", r'([a-z"].*|NDArray|Parameter|ParameterDict|Initializer|SymbolBlock)'),
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 3
myst_html_meta = {"description": "Batch normalization over all devices for MXNet Gluon"}
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

highlight_language = "none"  # the default of code blocks
html_theme = "furo"
html_title = f"gluon_syncbn {VERSION}"
if "GITHUB_REPOSITORY" in os.environ:  # each page that GitHub builds has an edit link
    html_theme_options = {
        "source_repository": os.environ["GITHUB_SERVER_URL"]
        + f"/{os.environ['GITHUB_REPOSITORY']}",
        "source_branch": os.environ["GITHUB_REF_NAME"],
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "scorer.js")
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"
copybutton_selector = "div:not(.highlight-text) > .highlight > pre"  # not for output
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Pages whose text is a file outside of docs, which GitHub also displays.
OUTER_PAGES = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "design/contributing": "CONTRIBUTING.md",
    "tour": "examples/tour.ipynb",
}


def read_outer_pages(app, docname, source):
    """Insert the file that OUTER_PAGES lists for a page, and adapt links to them."""
    if docname not in OUTER_PAGES:
        return
    here, file = Path(app.srcdir, docname).parent, ROOT / OUTER_PAGES[docname]
    app.env.note_dependency(str(file))
    pages = {ROOT / name: f"{page}.md" for page, name in OUTER_PAGES.items()}

    def relink(text, folder):
        def adapt(link):
            before, path, after = link.groups()
            target = (folder / path).resolve()
            if not target.exists():
                return link[0]  # not a link, such as f[0](x) in code
            target = Path(app.srcdir, pages[target]) if target in pages else target
            return f"{before}{os.path.relpath(target, here)}{after}"

        text = re.sub(r"(\]\()([^:)#]+)((?:#[^)]*)?\))", adapt, text)
        return re.sub(r'(<img src=")([^":]+)(")', adapt, text)

    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "\n\n".join(markdown_of(json.loads(text)["cells"]))
    own = re.sub(r"\A# .*\n", "", source[0])  # the title of the page on GitHub
    source[0] = f"{relink(text, file.parent)}\n{relink(own, here)}"


def markdown_of(cells):
    """Yield the text, code, printed output and pictures of a notebook."""
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
            continue
        yield f"```python\n{text}\n```"
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            if picture:
                yield f"![output](data:image/png;base64,{picture.strip()})"
            else:
                yield f"```text\n{''.join(output['text'])}```"


def visit_image(translator, node):
    """Link a figure to its picture in full size."""
    builder, uri = translator.builder, node["uri"]
    if uri in builder.images:  # the pictures of a notebook are no files
        full = f"{builder.imgpath}/{builder.images[uri]}"
        translator.body.append(f'<a class="figure" href="{full}">')
        translator.context.append("</a>")
    else:
        translator.context.append("")
    HTML5Translator.visit_image(translator, node)


def depart_image(translator, node):
    HTML5Translator.depart_image(translator, node)
    translator.body.append(translator.context.pop())


def break_long_names(app, pagename, templatename, context, doctree):
    """Let lines of the narrow table of contents break after underscores."""
    context["toc"] = re.sub("_(?=[^<>]*<)", "_<wbr>", context.get("toc", ""))


def check_places(app, exception):
    """Raise an error if docs/scorer.js leads to a page or a section that is gone."""
    script = (ROOT / "docs" / "scorer.js").read_text(encoding="utf-8")
    for page, anchor in re.findall(r'^  \w+: "([\w/]+)#?(.*)",$', script, re.M):
        text = Path(app.outdir, f"{page}.html").read_text(encoding="utf-8")
        if anchor and f'id="{anchor}"' not in text:
            raise ExtensionError(f"docs/scorer.js: {page} has no section {anchor}")


def visit_math(translator, node):
    inline = node.tagname == "math"
    formula = latex2mathml.tex2mathml(node.astext(), inline=inline)
    translator.body.append(formula if inline else f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app):
    app.connect("source-read", read_outer_pages)
    app.connect("html-page-context", break_long_names)
    app.connect("build-finished", check_places)
    app.add_node(nodes.image, override=True, html=(visit_image, depart_image))
    renderer = visit_math, None
    app.add_html_math_renderer("mathml", renderer, renderer)
