"""Parsing of HTML into sentences with trees of inline elements.

for segment in split_segments(tokenize_html("<p>The <b>red</b> car</p>")):
    text, root = InlineTreeBuilder(segment).build()         # "The red car", with <b> at characters 4 to 7
"""

import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import NamedTuple

VOID = set(re.findall("\\w+", "area base br col embed hr img input link meta param source track wbr"))
BLOCK_NAMES = """address article aside base blockquote body button caption center col colgroup dd details dialog dir div
dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li link
main menu meta nav noframes noscript ol optgroup option p pre script search section select style summary table tbody td
template textarea tfoot th thead title tr ul"""
BLOCKS = set(BLOCK_NAMES.split())  # elements that end a sentence; all others may occur inside a sentence
UNTRANSLATED_ELEMENTS = set(re.findall("\\w+", "code kbd math pre samp script style svg template textarea tt var"))
OPENING, CLOSING = "([{„‚¿¡（「『", ".,;:!?)]}»”’…%。，、；：！？）」』"  # no white space after, or before
BREAK = "\x1e"  # replaces <br> in the text to translate; as a line separator, it ends a sentence


class HtmlToken(NamedTuple):
    """A part of the source. The concatenation of all tokens is the source."""

    kind: str  # "text", "open", "close", "block", or "empty" (an inline element or comment without translated content)
    raw: str
    name: str = ""


class Neighbor(NamedTuple):
    """Left or right neighbor of an element without words."""

    has_space: bool  # whether white space is between
    character: str  # of the text; empty next to another element without words and at both ends of a sentence


@dataclass
class Node:
    """An inline element with the character offsets of its text, which may be empty."""

    start: int
    end: int
    opening: str = ""
    closing: str = ""
    children: list["Node"] = field(default_factory=list)
    is_leaf: bool = False  # visible, but without words, such as <code>, <img> or an icon
    is_unmatched: bool = False  # a tag without the other one of its element
    before: Neighbor = Neighbor(False, "")
    after: Neighbor = Neighbor(False, "")
    previous_leaf: "Node | None" = None  # if no text is between


class HtmlTokenizer(HTMLParser):
    """Parser that records where each token starts, so that tokens are exact substrings of the source."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=False)
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", source))]
        self.tokens: list[tuple[int, str, str, bool]] = []  # position, kind, name, whether not to translate the content
        self.feed(source)
        self.close()

    def add_token(self, kind: str, name: str = "", is_untranslated: bool = False) -> None:
        line, column = self.getpos()
        self.tokens.append((self.line_starts[line - 1] + column, kind, name, is_untranslated))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = [(name, str(value).lower()) for name, value in attrs]
        self.add_token("open", tag, tag in UNTRANSLATED_ELEMENTS or ("translate", "no") in values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.add_token("empty", tag)

    def handle_endtag(self, tag: str) -> None:
        self.add_token("close", tag)

    def handle_data(self, data: str) -> None:
        self.add_token("text")

    def handle_comment(self, data: str) -> None:
        self.add_token("empty")

    def parse_endtag(self, i: int) -> int:
        """Override that keeps "</>", which the parser ignores, as browsers do."""
        if self.rawdata.startswith("</>", i):
            self.add_token("empty")
        return super().parse_endtag(i)

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Override that reads "<![...>" as a comment, as browsers do. The parser raises AssertionError for "<![=>"."""
        return self.parse_bogus_comment(i)

    handle_entityref = handle_charref = handle_data  # type: ignore[assignment]  # their parameter names differ
    handle_decl = handle_pi = unknown_decl = handle_comment  # type: ignore[assignment]


def tokenize_html(source: str) -> Iterator[HtmlToken]:
    """Yield the tokens of the source. An element that is not translated is one token with its content."""
    tokens = HtmlTokenizer(source).tokens
    if source and (not tokens or tokens[0][0]):  # text that the parser skips, such as "&a" at the end
        tokens.insert(0, (0, "text", "", False))
    starts = [start for start, *_ in tokens] + [len(source)]
    i = 0
    while i < len(tokens):
        start, kind, name, is_untranslated = tokens[i]
        last = i
        if kind == "open" and is_untranslated and name not in VOID:
            depth = 0
            for j in range(i, len(tokens)):
                depth += {"open": 1, "close": -1}.get(tokens[j][1], 0) * (tokens[j][2] == name)
                if not depth:
                    last = j
                    break
            else:  # HTML allows to omit some end tags, such as </li>: the element ends before the next block
                last = next((j for j in range(i + 1, len(tokens)) if tokens[j][2] in BLOCKS), len(tokens)) - 1
            kind = "empty"
        while kind == "text" and tokens[last + 1 : last + 2] and tokens[last + 1][1] == "text":
            last += 1
        if kind != "text":
            kind = "block" if name in BLOCKS else "empty" if name in VOID else kind
        yield HtmlToken(kind, source[start : starts[last + 1]], name)
        i = last + 1


def split_segments(tokens: Iterator[HtmlToken]) -> Iterator[list[HtmlToken]]:
    """Yield each block token, and each run of tokens between block tokens."""
    for is_block, group in itertools.groupby(tokens, lambda token: token.kind == "block"):
        segment = list(group)
        yield from [[token] for token in segment] if is_block else [segment]


def has_text(token: HtmlToken) -> bool:
    """Return whether a token is text with other characters than white space."""
    return token.kind == "text" and not html.unescape(token.raw).isspace()


def match_tags(segment: list[HtmlToken]) -> dict[int, int]:
    """Return the index of the end tag for the index of each start tag that has one."""
    closing_index: dict[int, int] = {}
    unclosed: list[int] = []
    for i, token in enumerate(segment):
        if token.kind == "open":
            unclosed.append(i)
        elif token.kind == "close" and unclosed and segment[unclosed[-1]].name == token.name:
            closing_index[unclosed.pop()] = i
    return closing_index


class InlineTreeBuilder:
    """Builder of the text of a segment and the tree of its elements. Unmatched tags become empty elements.

    White space inside a sentence, such as a no-break space, becomes one space. The text has the spaces that it would
    have without the leaves: "the function <code>f</code>, which" becomes "the function, which". The leaves know their
    neighbors.
    """

    def __init__(self, segment: list[HtmlToken]):
        self.segment = segment
        self.text = ""
        self.path = [Node(0, 0)]
        self.spaces = [""]  # white space after the last word, between the leaves
        self.pending: list[tuple[Node, int]] = []  # elements after the last word, and the length of the space before
        self.last_leaf: Node | None = None  # after the last word
        self.is_separated = False  # by an element such as <code> or <img>, or between two links, after the last word
        self.follows_link = False  # without text between

    def build(self) -> tuple[str, Node]:
        """Return the text and the root of the tree."""
        closing_index = match_tags(self.segment)
        closing = set(closing_index.values())
        for i, token in enumerate(self.segment):
            if token.kind == "text":
                self.add_text(html.unescape(token.raw).replace(BREAK, " "))
            elif i in closing:
                node = self.path.pop()
                node.end = len(self.text)
                if node.start == node.end and not node.children:
                    self.add_leaf(node)
                self.follows_link |= token.name == "a"
            else:
                self.add_node(token, self.segment[closing_index[i]].raw if i in closing_index else "")
        self.add_words("")
        self.path[0].end = len(self.text)
        return self.text, self.path[0]

    def add_node(self, token: HtmlToken, closing: str) -> None:
        """Add an element, and enter it if it has an end tag."""
        neighbor = Neighbor(bool(self.spaces[-1]), "" if self.last_leaf else self.text[-1:].strip())
        node = Node(len(self.text), len(self.text), token.raw, closing, before=neighbor, previous_leaf=self.last_leaf)
        node.is_unmatched = not closing and token.kind in ("open", "close")
        self.path[-1].children.append(node)
        self.pending.append((node, sum(map(len, self.spaces))))
        self.is_separated |= self.follows_link and token.name == "a"
        if closing:
            self.path.append(node)
        elif token.name == "br":
            self.add_words(BREAK)
            node.start, node.end = len(self.text) - 1, len(self.text)
        elif token.kind == "empty" and token.name not in ("", "wbr"):
            self.is_separated = True
            self.add_leaf(node)

    def add_leaf(self, node: Node) -> None:
        """Mark an element as a leaf."""
        node.is_leaf = True
        if self.last_leaf:
            self.last_leaf.after = Neighbor(node.before.has_space, "")
        self.last_leaf = node
        self.spaces.append("")

    def add_text(self, content: str) -> None:
        """Add words and white space."""
        self.follows_link = False
        words = content.strip()
        if words:
            before, _, after = content.partition(words)
            self.spaces[-1] += before
            self.add_words(re.sub(r"\s+", " ", words))
            self.spaces = [after]
        else:
            self.spaces[-1] += content

    def add_words(self, words: str) -> None:
        """Append white space and words, or BREAK or nothing at the end of a sentence."""
        space = self.collapsed_space(words)
        limit = 0 if self.last_leaf and not words.strip() else len(space)  # a leaf precedes white space at the end
        for node, offset in self.pending:
            node.start = len(self.text) + min(offset, limit)
            node.end = max(node.start, node.end)
        if self.last_leaf:
            self.last_leaf.after = Neighbor(bool(self.spaces[-1]), words[:1].strip())
        self.text += space + words
        self.spaces, self.pending, self.last_leaf, self.is_separated = [""], [], None, False

    def collapsed_space(self, words: str) -> str:
        """Return the white space between the text and the next words."""
        previous, following = self.text[-1:].strip(), words[:1].strip()
        first, last = self.spaces[0], self.spaces[-1]
        if not previous or not following:  # the formatting of the source
            return last if previous else first
        if self.last_leaf and ((following in CLOSING and not last) or (previous in OPENING and not first)):
            return ""
        is_inside_word = previous.isalnum() and following.isalnum()
        return " " * (any(self.spaces) or (self.is_separated and is_inside_word))


__all__ = ["InlineTreeBuilder", "split_segments", "tokenize_html"]
