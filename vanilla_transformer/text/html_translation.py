"""HTML: what is between the tags is translated, and the tags move with their words.

translate_html(translate, "<p>The <b>red</b> car</p>")      # "<p>Das <b>rote</b> Auto</p>"
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, NamedTuple

from vanilla_transformer.alignment_vanilla_transformer import word_spans
from vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline
from vanilla_transformer.text.documents import LINE, Document, Span, translate_documents

VOID = set(re.findall("\\w+", "area base br col embed hr img input link meta param source track wbr"))
BLOCKS = set(  # elements at which a sentence ends; any other may stand inside one
    re.findall(
        "\\w+",
        """address article aside base blockquote body button caption center col colgroup dd details dialog dir div dl dt
        fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li
        link main menu meta nav noframes noscript ol optgroup option p pre script search section select style summary
        table tbody td template textarea tfoot th thead title tr ul""",
    )
)
UNTRANSLATED_ELEMENTS = set(
    re.findall("\\w+", "code kbd math pre samp script style svg template textarea tt var")
)  # not translated
BREAK = "\x1e"  # stands for <br> in a text, and ends a line there


class HtmlToken(NamedTuple):
    kind: str  # "text", "open", "close", "point" (a thing without content, inside a sentence) or "block"
    raw: str  # as it is in the source; all of them together are the source
    name: str = ""


@dataclass
class Node:
    """An element inside a sentence, or a point: all that stands between two characters of the text."""

    start: int
    end: int
    opening: str = ""
    closing: str = ""
    children: list["Node"] = field(default_factory=list)


Part = tuple[Node, int, int, int, int]  # an element, and its words and characters as `Placement.render_node` takes them


def translate_html(translator: TranslationPipeline, source: str, **options: Any) -> str:
    """Translates a page or a part of one. Every tag, comment and entity-like reference of the source is in the result
    once, none is added, and elements that were nested still are.

    Tags inside a sentence move to the words that translate theirs (`align`). Where these are not together, a tag goes
    to the most of them that are; where there are none, it stands empty between its neighbours. Attributes are not
    translated, and neither are `<code>`, `<pre>`, `<script>` and such, or elements with `translate="no"`.

    Args:
        source: HTML; whatever its mistakes, no tag is lost.
        **options: those of `translate_documents`.

    Raises:
        ValueError: several translations were asked for, or the tokenizer does not tell where its tokens stand.
    """
    segments = list(split_segments(tokenize_html(source)))
    trees = {
        i: build_inline_tree(segment) for i, segment in enumerate(segments) if any(p.kind == "text" for p in segment)
    }
    documents = translate_documents(
        translator, [collapse_line_breaks(text) for text, _ in trees.values()], **options, return_alignments=True
    )
    found = dict(zip(trees, documents, strict=True))
    return "".join(
        TagPlacer(*trees[i], found[i]).render() if i in found else "".join(piece.raw for piece in segment)
        for i, segment in enumerate(segments)
    )


class HtmlTokenizer(HTMLParser):
    """Notes what begins where; the pieces are cut out of the source, so that nothing of it is changed or lost."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=False)
        self.lines = [0, *(match.end() for match in re.finditer("\n", source))]
        self.found: list[tuple[int, str, str, bool]] = []  # place, kind, name, whether its content is kept
        self.feed(source)
        self.close()

    def add_token(self, kind: str, name: str = "", kept: bool = False) -> None:
        line, column = self.getpos()
        self.found.append((self.lines[line - 1] + column, kind, name, kept))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kept = tag in UNTRANSLATED_ELEMENTS or ("translate", "no") in attrs
        self.add_token("open", tag, kept)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.add_token("empty_element_position", tag)

    def handle_endtag(self, tag: str) -> None:
        self.add_token("close", tag)

    def handle_data(self, data: str) -> None:
        self.add_token("text")

    def handle_comment(self, data: str) -> None:
        self.add_token("empty_element_position")

    handle_entityref = handle_charref = handle_data  # type: ignore[assignment]  # their arguments have other names
    handle_decl = handle_pi = unknown_decl = handle_comment  # type: ignore[assignment]


def tokenize_html(source: str) -> Iterator[HtmlToken]:
    """The source in pieces, one behind the other; an element that is kept is one of them."""
    found = HtmlTokenizer(source).found
    if source and (not found or found[0][0]):  # what a reader of HTML passes over, such as "</>"
        found.insert(0, (0, "text", "", False))
    places = [place for place, *_ in found] + [len(source)]
    i = 0
    while i < len(found):
        place, kind, name, kept = found[i]
        last = i
        if kind == "open" and kept and name not in VOID:
            depth = 0
            for j in range(i, len(found)):
                depth += {"open": 1, "close": -1}.get(found[j][1], 0) * (found[j][2] == name)
                if not depth:
                    kind, last = "empty_element_position", j
                    break
        while kind == "text" and found[last + 1 : last + 2] and found[last + 1][1] == "text":
            last += 1
        if kind != "text":
            kind = "block" if name in BLOCKS else "empty_element_position" if name in VOID else kind
        yield HtmlToken(kind, source[place : places[last + 1]], name)
        i = last + 1


def split_segments(pieces: Iterator[HtmlToken]) -> Iterator[list[HtmlToken]]:
    """Blocks each alone, and what is between them."""
    segment: list[HtmlToken] = []
    for piece in pieces:
        if piece.kind != "block":
            segment.append(piece)
            continue
        if segment:
            yield segment
            segment = []
        yield [piece]
    if segment:
        yield segment


def build_inline_tree(segment: list[HtmlToken]) -> tuple[str, Node]:
    """The text of a segment, with its line breaks, and its elements as a tree. A tag without its partner is a point."""
    partner: dict[int, int] = {}
    open_: list[int] = []
    for i, piece in enumerate(segment):
        if piece.kind == "open":
            open_.append(i)
        elif piece.kind == "close" and open_ and segment[open_[-1]].name == piece.name:
            partner[open_.pop()] = i
    root = Node(0, 0)
    path, text = [root], ""
    closing = set(partner.values())
    for i, piece in enumerate(segment):
        if piece.kind == "text":
            text += html.unescape(piece.raw).replace(BREAK, " ")
        elif i in partner:
            path[-1].children.append(Node(len(text), 0, piece.raw, segment[partner[i]].raw))
            path.append(path[-1].children[-1])
        elif i in closing:
            path.pop().end = len(text)
        else:
            path[-1].children.append(Node(len(text), len(text), piece.raw))
            text += BREAK if piece.name == "br" else ""
    root.end = len(text)
    return text, root


def collapse_line_breaks(text: str) -> str:
    """A text with spaces for its line breaks, which they are in HTML, except those of <br>."""
    return "".join(char if char == BREAK or LINE.match(char) else " " for char in text)


class TagPlacer:
    """Puts the elements of a segment around the words of its translation."""

    def __init__(self, text: str, root: Node, document: Document):
        self.text, self.root, self.document = text, root, document
        self.words, self.others = word_spans(text), word_spans(document.translation)
        front = len(text) - len(text.lstrip())
        behind = max(len(text.rstrip()) - len(text), front - len(text)) or None
        self.translation = text[:front] + document.translation[front:behind] + (text[behind:] if behind else "")
        number = {span: i for i, span in enumerate(self.words)}
        link = {target: number.get(source) for source, target in document.alignments}
        self.links = [link.get(span) for span in self.others]  # of each word of the translation, its source's or None

    def render(self) -> str:
        """The segment with its tags."""
        result: list[str] = []
        stack: list[str | Part] = [(self.root, 0, len(self.others), 0, len(self.translation))]
        while stack:  # no recursion: elements may be nested more deeply than calls
            part = stack.pop()
            if isinstance(part, str):
                result.append(part)
            else:
                stack += reversed(self.render_node(*part))
        return "".join(result)

    def render_node(self, node: Node, low: int, high: int, start: int, end: int) -> list["str | Part"]:
        """What is inside an element that has the words from `low` to `high`, the characters from `start` to `end`."""
        spans = self.place_children(node, low, high)
        order = sorted(range(len(spans)), key=lambda i: (spans[i][2], i))
        parts: list[str | Part] = []
        place = start
        for i in order:
            child, (first, last, begin, behind) = node.children[i], spans[i]
            begin = min(max(begin, place), end)
            behind = min(max(behind, begin), end)
            parts += [self.escape_text(place, begin), self.space_before(child, begin), child.opening]
            parts += [(child, first, last, begin, behind), child.closing, self.space_behind(child, behind)]
            place = behind
        return [*parts, self.escape_text(place, end)]

    def space_before(self, point: Node, place: int) -> str:
        """The space in front of something without words that has come to stand behind a word."""
        has_space = point.start == point.end and self.text[: point.start].endswith(" ")
        return " " if has_space and place > 0 and not self.translation[place - 1].isspace() else ""

    def space_behind(self, point: Node, place: int) -> str:
        """The space behind something without words that has come to stand in front of a word."""
        has_space = point.start == point.end and self.text[point.start :].startswith(" ")
        is_word = self.translation[place : place + 1].isalnum()
        return " " if has_space and is_word else ""

    def place_children(self, node: Node, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Of each child its words (first, behind the last) in the translation, and its characters."""
        free = [True] * (high - low)
        spans: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * len(node.children)
        source_word_indices = [self.source_word_indices(child) for child in node.children]
        for i in sorted(range(len(spans)), key=lambda i: -len(source_word_indices[i])):
            gains = []
            for is_free, word in zip(free, self.links[low:high], strict=True):
                gain = 0 if word is None else 1 if word in source_word_indices[i] else -1
                gains.append(gain if is_free else -len(free))
            first, last = max_sum_run(gains)
            if first < last:
                if source_word_indices[i] >= self.source_word_indices(node):
                    first, last = 0, high - low
                free[first:last] = [False] * (last - first)
                begin, behind = self.others[low + first][0], self.others[low + last - 1][1]
                spans[i] = low + first, low + last, begin, behind
            else:
                place = self.empty_element_position(node.children[i].start)
                spans[i] = low, low, place, place
        return spans

    def source_word_indices(self, node: Node) -> set[int]:
        """The source's words that an element holds, whole or in part."""
        return {i for i, (start, end) in enumerate(self.words) if start < node.end and node.start < end}

    def empty_element_position(self, place: int) -> int:
        """The character of the translation before which something stands that has no words."""
        before, shift = 0, 0
        for sentence in self.document.sentences:
            if place <= sentence.source[0]:
                break
            if place < sentence.source[1]:
                return self.position_in_sentence(place, sentence.target)
            before, shift = sentence.source[1], sentence.target[1]
        return shift + place - before

    def position_in_sentence(self, place: int, target: Span) -> int:
        """In front of what translates the next word; or else behind what translates the one before."""
        following = next((i for i, (start, _) in enumerate(self.words) if start >= place), None)
        inside = [(j, word) for j, word in enumerate(self.links) if target[0] <= self.others[j][0] < target[1]]
        if found := [j for j, word in inside if word == following is not None]:
            return self.others[found[0]][0]
        if found := [j for j, word in inside if word is not None and self.words[word][1] <= place]:
            return self.others[max(found, key=lambda j: (self.links[j], j))][1]
        return target[1]

    def escape_text(self, start: int, end: int) -> str:
        """A part of the translation as HTML; the white space at both ends of the segment is the source's own."""
        text = html.escape(self.translation[start:end].replace(BREAK, ""), quote=False)
        return text.replace("\xa0", "&nbsp;")


def max_sum_run(gains: list[int]) -> Span:
    """The shortest of the runs with the largest sum above 0: its first index and the one behind its last, or (0, 0)."""
    best, found, start, total = 0, (0, 0), 0, 0
    for i, gain in enumerate(gains):
        if total <= 0:
            start, total = i, 0
        total += gain
        if total > best or (total == best > 0 and i + 1 - start < found[1] - found[0]):
            best, found = total, (start, i + 1)
    return found


__all__ = ["translate_html"]
