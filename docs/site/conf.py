"""How `make site` turns README, guides, notebooks as committed and docstrings into pages: its log has every fault.

The Makefile copies what Sphinx reads, because the API's pages are written into the same folder. Nothing of ours is
imported and no notebook is run.
"""

import ast
import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
WARN = logging.getLogger(__name__).warning

project = html_title = "t5accel"
copyright = "the t5accel authors"
html_theme = "furo"  # it needs no fonts and scripts from elsewhere
html_static_path, html_css_files = ["site.css", "sift.js"], ["site.css"]
html_js_files = [("sift.js", {"type": "module"})]
html_copy_source = html_show_sphinx = False
extensions = ["myst_nb", "autoapi.extension", "sphinx.ext.napoleon"]
suppress_warnings = [
    "autoapi.python_import_resolution",  # of names assigned in pairs, which it does not see
    "ref.python",  # two modules may have a `Row`
]

exclude_patterns = ["docs/site", "**/.ipynb_checkpoints"]
nb_execution_mode = "off"
myst_heading_anchors = 3

# Every module, found by itself; a folder's page lists what is in it.
autoapi_dirs = [str(ROOT / "t5accel")]
autoapi_root = "api"
autoapi_template_dir = str(Path(__file__).parent)
autoapi_options = ["members", "undoc-members", "show-inheritance"]
autoapi_add_toctree_entry = False
napoleon_use_ivar = True  # attributes as a list, not as entries of their own beside those of the class
add_module_names = False
python_use_unqualified_type_names = True  # of ours: they are links
maximum_signature_line_length = 100  # a longer one has a line for each parameter

# `name` in a docstring leads to what it names, or is code; a dotted name of ours that leads nowhere is a fault.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!t5accel\.).*")]


def autoapi_prepare_jinja_env(environment):
    """For the page of `t5accel`: what it offers, by name the place where each is defined."""
    tree = ast.parse((ROOT / "t5accel" / "__init__.py").read_text(encoding="utf-8"))
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    modules, aliases = (ast.literal_eval(assigned[name]) for name in ("_MODULES", "_ALIASES"))
    environment.globals["offered"] = {name: f"t5accel.{module}.{name}" for name, module in modules.items()}
    environment.globals["aliases"] = aliases


def lead_to_api(app, docname, source):
    """A link to a source file or folder of ours, as a reader of the repository needs it, becomes one to its page."""

    source[0] = re.sub(r"\]\((?:\.\./)*(t5accel/[\w/]*\w)(?:\.py|/)?\)", r"](/api/\1/index.rst)", source[0])
    # `bench` and `training` have no pages: the link's text stays.
    for path in re.findall(r"\]\((?:\.\./)*((?:bench|training)(?:/[\w/.]*)?)\)", source[0]):
        if not (ROOT / path).exists():
            WARN("a link leads to %s, which does not exist", path, location=docname)
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)*(?:bench|training)(?:/[\w/.]*)?\)", r"\1", source[0])


def keep_first_line(app, what, name, thing, options, lines):
    """Napoleon would take what stands before a property's first colon for its type."""
    if what in ("property", "attribute", "data"):
        lines.insert(0, "\\ ")  # nothing, to reStructuredText


def register_anchors(app, doctree):
    """`<a id="name"></a>`, as each term of the glossary has it: MyST knows only the anchors of headings."""
    anchors = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for node in doctree.findall(nodes.raw):
        anchors |= {name: (0, name, "") for name in re.findall(r'<a id="([\w-]+)">', node.astext())}


def find_lost_markup(app, doctree):
    """Examples that a missing empty line has made part of a paragraph."""
    for paragraph in doctree.findall(nodes.paragraph):
        if ">>> " in paragraph.astext():
            WARN("an example became prose: an empty line is missing before it", location=paragraph)


def find_the_network(app, error):
    """What a page would fetch from elsewhere before it can be read, such as MathJax for a formula."""
    for page in Path(app.outdir).rglob("*.html"):
        if found := re.search(r"<(script|link)[^>]*https?://[^>]*>", page.read_text(encoding="utf-8")):
            WARN("%s needs the network: %s", page.relative_to(app.outdir), found[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", lead_to_api)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)
    app.connect("doctree-read", register_anchors)
    app.connect("doctree-read", find_lost_markup)
    app.connect("build-finished", find_the_network)
