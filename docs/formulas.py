"""Formulas of the notebook as MathML, which browsers draw by themselves: no script that a reader has to download.

A hook of mkdocs, called for every page.
"""

import html
import re

from latex2mathml.converter import convert

CODE = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<[^>]+>)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)


def on_page_content(content: str, page, **_) -> str:
    """The page's HTML with MathML for `$...$` and `$$...$$` of its text; code stays as it is."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    parts = CODE.split(content)  # every second one is code or a tag
    return "".join(part if i % 2 else FORMULA.sub(formula, part) for i, part in enumerate(parts))


def formula(match: re.Match) -> str:
    block, line = match.groups()
    return convert(html.unescape(block or line), display="block" if block else "inline")
