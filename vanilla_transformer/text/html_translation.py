"""Translation of HTML: the text between tags is translated, and inline tags move with their words.

translate_html(translate, "<p>The <b>red</b> car</p>")      # "<p>Das <b>rote</b> Auto</p>"
"""

import html
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

from vanilla_transformer.alignment_vanilla_transformer import Span, character_class, word_spans
from vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline
from vanilla_transformer.text.documents import Document, translate_documents
from vanilla_transformer.text.html_parsing import (
    BREAK,
    CLOSING,
    OPENING,
    InlineTreeBuilder,
    Neighbor,
    Node,
    has_text,
    split_segments,
    tokenize_html,
)

QUOTES = "\"'“”„‟«»‘’‚‹›"

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
    trees = {i: InlineTreeBuilder(each).build() for i, each in enumerate(segments) if any(map(has_text, each))}
    texts = [text for text, _ in trees.values()]
    documents = iter(translate_documents(translator, texts, **options | {"return_alignments": True}))
    return "".join(
        TagPlacer(*trees[i], next(documents)).render() if i in trees else "".join(token.raw for token in segment)
        for i, segment in enumerate(segments)
    )


class TagPlacer:
    """Renderer that puts the inline tags of a segment around the translated words."""

    def __init__(self, text: str, root: Node, document: Document):
        self.text, self.root, self.document = text, root, document
        self.source_words, self.target_words = word_spans(text), word_spans(document.translation)
        start = len(text) - len(text.lstrip())
        stop = max(len(text.rstrip()) - len(text), start - len(text)) or None
        self.translation = text[:start] + document.translation[start:stop] + (text[stop:] if stop else "")
        # line breaks have the same order in both texts
        self.breaks = [[i for i, each in enumerate(side) if each == BREAK] for side in (text, self.translation)]
        index = {span: i for i, span in enumerate(self.source_words)}
        links = {target: index.get(source) for source, target in document.alignments}
        self.links = [links.get(span) for span in self.target_words]  # source word index of each target word, or None
        self.linked: list[list[int]] = [[] for _ in self.source_words]  # target word indices of each source word
        for j, i in enumerate(self.links):
            if i is not None:
                self.linked[i].append(j)

    def render(self) -> str:
        writer = InlineWriter()
        stack: list[str | Span | PlacedNode] = [(self.root, 0, len(self.target_words), 0, len(self.translation))]
        while stack:  # without recursion, because the nesting may exceed the recursion limit
            part = stack.pop()
            if isinstance(part, str):
                writer.add_tag(part, is_closing=True)
            elif len(part) == 2:
                writer.add_text(self.translation[part[0] : part[1]])
            elif part[0].is_leaf:
                writer.add_leaf(part[0])
            else:
                writer.add_tag(part[0].opening)
                stack += [part[0].closing, *reversed(self.node_content(*part))]
        return "".join(writer.parts)

    def node_content(self, node: Node, low: int, high: int, start: int, end: int) -> list["Span | PlacedNode"]:
        """Return the content of a placed element: target words `low` to `high`, characters `start` to `end`."""
        spans = self.locate_children(node, low, high)
        parts: list[Span | PlacedNode] = []
        for i in sorted(range(len(spans)), key=lambda i: (spans[i][2], i)):
            first, last, child_start, child_end = spans[i]
            child_start = min(max(child_start, start), end)
            child_end = min(max(child_end, child_start), end)
            parts += [(start, child_start), (node.children[i], first, last, child_start, child_end)]
            start = child_end
        return [*parts, (start, end)]

    def locate_children(self, node: Node, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Return the span of target words and the span of characters of each child."""
        free = [True] * (high - low)
        breaks = [self.target_breaks(child) for child in node.children]
        located = {i: self.locate_part(child, low, high) for i, child in enumerate(node.children) if not breaks[i]}
        parts = {i: part for i, part in located.items() if part}
        spans = [parts.get(i, (0, 0, 0, 0)) for i in range(len(node.children))]
        ranges = [self.source_word_range(child) for child in node.children]
        for i in sorted(parts.keys() ^ set(range(len(spans))), key=lambda i: (not breaks[i], -len(ranges[i]), i)):
            # parts of words that this child shares with siblings
            shared = {k: part for k, part in parts.items() if self.links[part[0]] in ranges[i]} if ranges[i] else {}
            occupied = {part[0] for k, part in parts.items() if k not in shared} if ranges[i] else set()
            linked = [j for word in ranges[i] for j in self.linked[word] if low <= j < high]
            start = min(linked, default=low)
            scores = []  # of target words: 1 if aligned to a word of the child, -1 if aligned to another word
            for j in range(start, max(linked, default=low - 1) + 1):
                score = 0 if self.links[j] is None else 1 if self.links[j] in ranges[i] else -1
                scores.append(score if free[j - low] and j not in occupied else -len(free))
            first, last = (start + offset for offset in max_sum_run(scores))
            if first < last:
                if len(ranges[i]) == len(self.source_word_range(node)):
                    first, last = low, high
                start, end = self.target_words[first][0], self.target_words[last - 1][1]
                for k, (word, _, part_start, part_end) in shared.items():
                    if part_end < end and (start == part_start or (k < i and word == first)):
                        start = max(start, part_end)
                    elif start < part_start < end:
                        end = part_start
                spans[i] = self.enclose(breaks[i], (start, end), low, high) if breaks[i] else (first, last, start, end)
                first, last, *_ = spans[i]
                free[first - low : last - low] = [False] * (last - first)
            elif breaks[i]:
                spans[i] = self.enclose(breaks[i], (breaks[i][0], breaks[i][-1] + 1), low, high)
            else:
                position = self.empty_element_position(node.children[i].start)
                following = self.text[node.children[i].start :][:1]
                if following.isspace() and following != BREAK:  # it may touch the previous word
                    position = self.end_of_previous_word(node.children[i].start, low, high) or position
                spans[i] = low, low, position, position
        position = len(self.translation)
        for i in reversed([i for i, child in enumerate(node.children) if child.is_unmatched]):  # keep their order
            position = min(position, spans[i][2])
            spans[i] = low, low, position, position
        return spans

    def target_breaks(self, node: Node) -> list[int]:
        """Return the positions of an element's line breaks in the translation."""
        source, target = self.breaks
        return target[bisect_left(source, node.start) : bisect_left(source, node.end)]

    def enclose(self, breaks: list[int], span: Span, low: int, high: int) -> tuple[int, int, int, int]:
        """Return the span of words, from `low` to `high`, and of characters that also encloses line breaks."""
        start, end = min(breaks[0], span[0]), max(breaks[-1] + 1, span[1])
        first, last = (bisect_left(self.target_words, each, key=itemgetter(0)) for each in (start, end))
        return min(max(first, low), high), min(max(last, low), high), start, end

    def end_of_previous_word(self, position: int, low: int, high: int) -> int | None:
        """Return where the translation of the source word that ends at `position` ends, among words `low` to `high`."""
        index = bisect_left(self.source_words, position, key=itemgetter(1))
        if self.source_words[index : index + 1] and self.source_words[index][1] == position:
            linked = (j for j in reversed(self.linked[index]) if low <= j < high)
            return next((self.target_words[j][1] for j in linked), None)
        return None

    def locate_part(self, node: Node, low: int, high: int) -> tuple[int, int, int, int] | None:
        """Return the span of an element that encloses a part of a word, if the translation contains the same part.

        Examples are formulas and footnotes, such as "H<sub>2</sub>O". The position must be the same, or the end.
        """
        words = self.source_word_range(node)
        if len(words) != 1:
            return None
        (index,) = words
        start, end = self.source_words[index]
        first, last = max(node.start, start), min(node.end, end)
        if (first, last) == (start, end):
            return None
        part = self.text[first:last]
        for j in (j for j in self.linked[index] if low <= j < high):
            target_start, target_end = self.target_words[j]
            word = self.translation[target_start:target_end]
            if last == end and word.endswith(part):
                return j, j + 1, target_end - len(part), target_end
            if word[first - start : last - start] == part:
                return j, j + 1, target_start + first - start, target_start + last - start
        return None

    def source_word_range(self, node: Node) -> range:
        """Return the indices of the source words that overlap an element, none for an empty one."""
        if node.start == node.end:
            return range(0)
        first = bisect_right(self.source_words, node.start, key=itemgetter(1))
        return range(first, bisect_left(self.source_words, node.end, key=itemgetter(0)))

    def empty_element_position(self, position: int) -> int:
        """Return the character of the translation before which an element without words is placed."""
        sentences = self.document.sentences
        n = bisect_left(sentences, position, key=lambda sentence: sentence.source[0])  # that start before
        if not n:
            return position
        source, target = sentences[n - 1].source, sentences[n - 1].target
        if position < source[1]:
            return self.position_in_sentence(position, source, target)
        return target[1] + position - source[1]

    def position_in_sentence(self, position: int, source: Span, target: Span) -> int:
        """Return the start of this or the next source word's translation, else the end of the previous word's."""
        next_word = bisect_right(self.source_words, position, key=itemgetter(1))
        first = bisect_right(self.source_words, source[0], key=itemgetter(1))
        for word in [next_word, *range(next_word - 1, first - 1, -1)]:
            linked = self.linked[word] if word < len(self.linked) else []
            spans = [self.target_words[j] for j in linked if target[0] <= self.target_words[j][0] < target[1]]
            if spans:
                return spans[0][0] if word == next_word else spans[-1][1]
        return target[1]


class InlineWriter:
    """Writer that separates leaves from their neighbors by white space as in the source."""

    def __init__(self) -> None:
        self.parts: list[str] = [""]
        self.space_index = 0  # of the part where white space after the last text or leaf is inserted
        self.last: Node | str = ""  # the last leaf or character

    def add_tag(self, tag: str, is_closing: bool = False) -> None:
        self.parts.append(tag)
        if is_closing and self.space_index == len(self.parts) - 2:  # white space belongs to the outer element
            self.parts[-2:] = [tag, ""]
            self.space_index += 1

    def add_text(self, text: str) -> None:
        if text:
            has_space = isinstance(self.last, Node) and needs_space(self.last.after, text[0], CLOSING)
            escaped = html.escape(text.replace(BREAK, ""), quote=False).replace("\xa0", "&nbsp;")
            self.add(escaped, has_space, text[-1])

    def add_leaf(self, leaf: Node) -> None:
        if isinstance(self.last, Node):
            has_space = leaf.before.has_space or leaf.previous_leaf is not self.last
        else:
            has_space = needs_space(leaf.before, self.last, OPENING)
        self.add(leaf.opening + leaf.closing, has_space, leaf)

    def add(self, part: str, has_space: bool, last: Node | str) -> None:
        self.parts[self.space_index] = " " * has_space
        self.parts += [part, ""]
        self.space_index = len(self.parts) - 1
        self.last = last


def needs_space(neighbor: Neighbor, character: str, unspaced: str) -> bool:
    """Return whether white space separates a leaf from a character of the translation.

    Args:
        neighbor: Neighbor of the leaf in the source.
        character: Neighbor in the translation, or an empty string at both ends.
        unspaced: Characters that have no white space on this side, unless they have it in the source.
    """
    if not character or character.isspace():
        return False
    kind = character_kind(character)
    if kind == character_kind(neighbor.character):
        return neighbor.has_space
    return character not in unspaced and kind != "symbol"


def character_kind(character: str) -> str:
    """Return "word", "symbol" (in unsegmented scripts), "quote", or any other character itself."""
    if not character:
        return ""
    if character in QUOTES:
        return "quote"
    kind = character_class(character)
    return "word" if kind in ("word", "mark") else kind if character.isalnum() else character


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
