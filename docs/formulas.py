"""Hook of mkdocs that converts formulas of the notebook to MathML, which browsers display without scripts."""

import html
import re

from latex2mathml.converter import convert

CODE = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<[^>]+>)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)


def on_page_content(content: str, page, **_) -> str:
    """Return the HTML of a page with MathML for `$...$` and `$$...$$` outside code."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    parts = CODE.split(content)  # parts with odd index are code or tags
    return "".join(part if i % 2 else FORMULA.sub(to_mathml, part) for i, part in enumerate(parts))


def to_mathml(match: re.Match) -> str:
    block, inline = match.groups()
    return convert(html.unescape(block or inline), display="block" if block else "inline")
