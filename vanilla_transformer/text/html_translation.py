"""Translation of HTML: the text between tags is translated, and inline tags move with their words.

translate_html(translate, "<p>The <b>red</b> car</p>")      # "<p>Das <b>rote</b> Auto</p>"
"""

import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, NamedTuple

from vanilla_transformer.alignment_vanilla_transformer import Span, word_spans
from vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline
from vanilla_transformer.text.documents import Document, translate_documents

VOID = set(re.findall("\\w+", "area base br col embed hr img input link meta param source track wbr"))
BLOCK_NAMES = """address article aside base blockquote body button caption center col colgroup dd details dialog dir div
dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li link
main menu meta nav noframes noscript ol optgroup option p pre script search section select style summary table tbody td
template textarea tfoot th thead title tr ul"""
BLOCKS = set(BLOCK_NAMES.split())  # elements that end a sentence; all others may occur inside a sentence
UNTRANSLATED_ELEMENTS = set(re.findall("\\w+", "code kbd math pre samp script style svg template textarea tt var"))
CLOSING = ".,;:!?)]}»”’…。，、；：！？）」』"
BREAK = "\x1e"  # replaces <br> in the text to translate; as a line separator, it ends a sentence


class HtmlToken(NamedTuple):
    """A part of the source. The concatenation of all tokens is the source."""

    kind: str  # "text", "open", "close", "block", or "empty" (an inline element or comment without translated content)
    raw: str
    name: str = ""


@dataclass
class Node:
    """An inline element with the character offsets of its text, which may be empty."""

    start: int
    end: int
    opening: str = ""
    closing: str = ""
    children: list["Node"] = field(default_factory=list)
    follows_space: bool = False  # white space precedes the element
    precedes_space: bool = False  # white space follows the element


PlacedNode = tuple[Node, int, int, int, int]  # element, and the word span and character span of its translation


def translate_html(translator: TranslationPipeline, source: str, **options: Any) -> str:
    """Translate an HTML page or fragment.

    The result contains every tag and comment of the source exactly once, and the elements have the same nesting. A tag
    inside a sentence encloses the translations of its words (see `align`), or if these are not adjacent, most of them.
    A tag without translated words is placed between the translations of the neighboring words. Attributes, `<code>`,
    `<pre>`, `<script>` and similar elements, and elements with `translate="no"` are not translated.

    Args:
        translator: Translation pipeline.
        source: HTML, which may be malformed.
        **options: Options of `translate_documents`.

    Raises:
        ValueError: If several translations are requested or the tokenizer does not return offsets.
    """
    segments = list(split_segments(tokenize_html(source)))
    trees = {i: build_inline_tree(each) for i, each in enumerate(segments) if any(map(has_text, each))}
    texts = [text for text, _ in trees.values()]
    documents = iter(translate_documents(translator, texts, **options | {"return_alignments": True}))
    return "".join(
        TagPlacer(*trees[i], next(documents)).render() if i in trees else "".join(token.raw for token in segment)
        for i, segment in enumerate(segments)
    )


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


def build_inline_tree(segment: list[HtmlToken]) -> tuple[str, Node]:
    """Return the text of a segment and the tree of its elements. Unmatched tags become empty elements."""
    closing_index = match_tags(segment)
    closing = set(closing_index.values())
    root = Node(0, 0)
    path, text, content = [root], "", ""
    last: list[Node] = []  # the last element without translated content, and comments and unmatched tags after it
    is_separated = False  # by an element without translated content, such as <code> or <img>
    for i, token in enumerate(segment):
        if token.kind == "text":
            content = html.unescape(token.raw).replace(BREAK, " ")
            content = " " * (is_separated and text[-1:].isalnum() and content[:1].isalnum()) + content
            words = content.lstrip()
            indent = content[: len(content) - len(words)]
            for node in last:
                node.precedes_space |= bool(indent) and node.start == len(text)
            if not starts_sentence(text):  # white space inside a sentence is one space, as in a browser
                indent = " " if indent and not text.endswith(" ") else ""
            text += indent + re.sub(r"\s+", " ", words)
            is_separated = False
        elif i in closing:
            node = path.pop()
            node.end = len(text)
            last = [node] if node.start == node.end else last
        else:
            node = Node(len(text), len(text), token.raw, segment[closing_index[i]].raw if i in closing_index else "")
            is_adjacent = any(each.start == node.start and not each.precedes_space for each in last)
            node.follows_space = text[-1:].isspace() and not is_adjacent
            path[-1].children.append(node)
            if i in closing_index:
                path.append(node)
            elif token.kind == "empty" and token.name not in ("", "wbr"):
                last, is_separated = [node], True
                text += BREAK if token.name == "br" else ""
            else:
                last.append(node)
    if text.endswith(" ") and not starts_sentence(text):
        text = text[:-1] + (content[len(content.rstrip()) :] or " ")  # the formatting of the source
    root.end = len(text)
    return text, root


def starts_sentence(text: str) -> bool:
    """Return whether a text ends where a sentence starts, apart from white space."""
    before = text.rstrip()
    return not before or BREAK in text[len(before) :]


class TagPlacer:
    """Renderer that puts the inline tags of a segment around the translated words."""

    def __init__(self, text: str, root: Node, document: Document):
        self.text, self.root, self.document = text, root, document
        self.source_words, self.target_words = word_spans(text), word_spans(document.translation)
        start = len(text) - len(text.lstrip())
        stop = max(len(text.rstrip()) - len(text), start - len(text)) or None
        self.translation = text[:start] + document.translation[start:stop] + (text[stop:] if stop else "")
        index = {span: i for i, span in enumerate(self.source_words)}
        links = {target: index.get(source) for source, target in document.alignments}
        self.links = [links.get(span) for span in self.target_words]  # source word index of each target word, or None

    def render(self) -> str:
        result: list[str] = []
        stack: list[str | PlacedNode] = [(self.root, 0, len(self.target_words), 0, len(self.translation))]
        while stack:  # without recursion, because the nesting may exceed the recursion limit
            part = stack.pop()
            if isinstance(part, str):
                result.append(part)
            else:
                stack += reversed(self.render_node(*part))
        return "".join(result)

    def render_node(self, node: Node, low: int, high: int, start: int, end: int) -> list["str | PlacedNode"]:
        """Return the content of a placed element: target words `low` to `high`, characters `start` to `end`."""
        spans = self.locate_children(node, low, high)
        order = sorted(range(len(spans)), key=lambda i: (spans[i][2], i))
        parts: list[str | PlacedNode] = []
        position = start
        follows_element = False  # an empty one, without a space between
        for i in order:
            child, (first, last, child_start, child_end) = node.children[i], spans[i]
            child_start = min(max(child_start, position), end)
            child_end = min(max(child_end, child_start), end)
            follows_element &= position == child_start
            has_space = node.start < node.end or bool(parts)  # otherwise the space precedes the parent, if it is empty
            before = self.space_before(child, child_start, follows_element) if has_space else ""
            after = self.space_after(child, child_end)
            parts += [self.escape_text(position, child_start), before, child.opening]
            parts += [(child, first, last, child_start, child_end), child.closing, after]
            position = child_end
            follows_element = child.start == child.end and not after
        return [*parts, self.escape_text(position, end)]

    def space_before(self, node: Node, position: int, follows_element: bool) -> str:
        """Return the space that precedes an empty element in the source, if the translation has none there."""
        has_space = node.start == node.end and node.follows_space
        is_missing = follows_element or (position > 0 and not self.translation[position - 1].isspace())
        return " " if has_space and is_missing else ""

    def space_after(self, node: Node, position: int) -> str:
        """Return the space that follows an empty element in the source, unless white space or punctuation follows."""
        has_space = node.start == node.end and node.precedes_space
        following = self.translation[position : position + 1]
        return " " if has_space and following and not (following.isspace() or following in CLOSING) else ""

    def locate_children(self, node: Node, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Return the span of target words and the span of characters of each child."""
        free = [True] * (high - low)
        parts = {i: part for i, child in enumerate(node.children) if (part := self.locate_part(child, low, high))}
        spans = [parts.get(i, (0, 0, 0, 0)) for i in range(len(node.children))]
        indices = [self.source_word_indices(child) for child in node.children]
        for i in sorted(parts.keys() ^ set(range(len(spans))), key=lambda i: (-len(indices[i]), i)):
            # parts of words that this child shares with siblings
            shared = [part for part in parts.values() if self.links[part[0]] in indices[i]]
            occupied = {part[0] for part in parts.values() if part not in shared}
            scores = []  # of target words: 1 if aligned to a word of the child, -1 if aligned to another word
            for j, word in enumerate(self.links[low:high], low):
                score = 0 if word is None else 1 if word in indices[i] else -1
                scores.append(score if free[j - low] and j not in occupied else -len(free))
            first, last = max_sum_run(scores)
            if first < last:
                if indices[i] >= self.source_word_indices(node):
                    first, last = 0, high - low
                free[first:last] = [False] * (last - first)
                start, end = self.target_words[low + first][0], self.target_words[low + last - 1][1]
                for *_, part_start, part_end in shared:
                    end = part_start if start < part_start < end else end
                    start = part_end if start == part_start and part_end < end else start
                spans[i] = low + first, low + last, start, end
            else:
                position = self.empty_element_position(node.children[i].start)
                following = self.text[node.children[i].start :][:1]
                if following.isspace() and following != BREAK:  # it may touch the previous word
                    position = self.end_of_previous_word(node.children[i].start, low, high) or position
                spans[i] = low, low, position, position
        return spans

    def end_of_previous_word(self, position: int, low: int, high: int) -> int | None:
        """Return where the translation of the source word that ends at `position` ends, among words `low` to `high`."""
        index = next((i for i, (_, end) in enumerate(self.source_words) if end == position), None)
        linked = (j for j in reversed(range(low, high)) if index is not None and self.links[j] == index)
        return next((self.target_words[j][1] for j in linked), None)

    def locate_part(self, node: Node, low: int, high: int) -> tuple[int, int, int, int] | None:
        """Return the span of an element that encloses a part of a word, if the translation contains the same part.

        Examples are formulas and footnotes, such as "H<sub>2</sub>O". The position must be the same, or the end.
        """
        words = self.source_word_indices(node)
        if len(words) != 1:
            return None
        (index,) = words
        start, end = self.source_words[index]
        first, last = max(node.start, start), min(node.end, end)
        if (first, last) == (start, end):
            return None
        part = self.text[first:last]
        for j in (j for j in range(low, high) if self.links[j] == index):
            target_start, target_end = self.target_words[j]
            word = self.translation[target_start:target_end]
            if last == end and word.endswith(part):
                return j, j + 1, target_end - len(part), target_end
            if word[first - start : last - start] == part:
                return j, j + 1, target_start + first - start, target_start + last - start
        return None

    def source_word_indices(self, node: Node) -> set[int]:
        """Return the indices of the source words that overlap an element, none for an empty one."""
        if node.start == node.end:
            return set()
        return {i for i, (start, end) in enumerate(self.source_words) if start < node.end and node.start < end}

    def empty_element_position(self, position: int) -> int:
        """Return the character of the translation before which an element without words is placed."""
        source_end = target_end = 0
        for sentence in self.document.sentences:
            if position <= sentence.source[0]:
                break
            if position < sentence.source[1]:
                return self.position_in_sentence(position, sentence.target)
            source_end, target_end = sentence.source[1], sentence.target[1]
        return target_end + position - source_end

    def position_in_sentence(self, position: int, target: Span) -> int:
        """Return the start of this or the next source word's translation, else the end of the previous word's."""
        next_word = next((i for i, (_, end) in enumerate(self.source_words) if end > position), None)
        links = [(j, word) for j, word in enumerate(self.links) if target[0] <= self.target_words[j][0] < target[1]]
        if matches := [j for j, word in links if word == next_word is not None]:
            return self.target_words[matches[0]][0]
        if matches := [j for j, word in links if word is not None and self.source_words[word][1] <= position]:
            return self.target_words[max(matches, key=lambda j: (self.links[j], j))][1]
        return target[1]

    def escape_text(self, start: int, end: int) -> str:
        text = html.escape(self.translation[start:end].replace(BREAK, ""), quote=False)
        return text.replace("\xa0", "&nbsp;")


def max_sum_run(scores: list[int]) -> Span:
    """Return the start and end of the shortest run with the largest positive sum, or (0, 0) if there is none."""
    best_sum, best, start, total = 0, (0, 0), 0, 0
    for i, score in enumerate(scores):
        if total <= 0:
            start, total = i, 0
        total += score
        if total > best_sum or (total == best_sum > 0 and i + 1 - start < best[1] - best[0]):
            best_sum, best = total, (start, i + 1)
    return best


__all__ = ["translate_html"]
