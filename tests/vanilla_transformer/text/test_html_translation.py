import html
import random
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("sentencex")

from vanilla_transformer.alignment_vanilla_transformer import word_spans  # noqa: E402
from vanilla_transformer.text.html_parsing import VOID, InlineTreeBuilder, tokenize_html  # noqa: E402
from vanilla_transformer.text.html_translation import TagPlacer, max_sum_run, translate_html  # noqa: E402


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<p>one <b>two</b> three</p>", "<p>THREE <b>TWO</b> ONE</p>"),
        ("<b>one two</b> three", "THREE <b>TWO ONE</b>"),
        ("<i>one <b>two</b></i> three", "THREE <i><b>TWO</b> ONE</i>"),
        ("<b>one two</b>", "<b>TWO ONE</b>"),
        ("<b> one </b>two", " TWO <b>ONE</b>"),
        ("one <a href='x>y' TITLE=\"two\">two</a>", "<a href='x>y' TITLE=\"two\">TWO</a> ONE"),
        ("one &amp; two &lt; three", "THREE &lt; TWO &amp; ONE"),
        ("<h1>one two</h1>\n\n <p>three</p> four", "<h1>TWO ONE</h1>\n\n <p>THREE</p> FOUR"),
        ("one two<br>three four<br/>five", "TWO ONE<br>FOUR THREE<br/>FIVE"),
        ("one\ntwo", "TWO ONE"),
        ("<p>\n    one\n\t<b>two\xa0 three</b>\n  </p>", "<p>\n    <b>THREE TWO</b> ONE\n  </p>"),
        ("one<br>\n   two &nbsp; three\n", "ONE<br>\n   THREE TWO\n"),
        ("one <img src=x> two", "<img src=x> TWO ONE"),
        ("one <code>a &lt; two</code> three", "<code>a &lt; two</code> THREE ONE"),
        ("one <b translate=no>two</b> three", "<b translate=no>two</b> THREE ONE"),
        ("one <b Translate=NO>two</b> three", "<b Translate=NO>two</b> THREE ONE"),
        ("<script>if (a < b) { one }</script>one", "<script>if (a < b) { one }</script>ONE"),
        ("one<!-- two -->", "ONE<!-- two -->"),
        ("<!DOCTYPE html><html><title>one two</title></html>", "<!DOCTYPE html><html><title>TWO ONE</title></html>"),
        ("<ul><li>one two<li>three</ul>", "<ul><li>TWO ONE<li>THREE</ul>"),
        ("<ul><li translate=no>one <b>two</b><li>three</ul>", "<ul><li translate=no>one <b>two</b><li>THREE</ul>"),
        ("one <code>two", "ONE <code>two"),
        ("&nbsp;one&nbsp;", "&nbsp;ONE&nbsp;"),
        ("one</> <b>two</></b>", "<b>TWO</></b> ONE</>"),
        ("one <b></b> two", "<b></b> TWO ONE"),
        ("one h<sub>2</sub>o two", "TWO H<sub>2</sub>O ONE"),
        ("c<sub>6</sub>h<sub>12</sub> <i>x<sup>2</sup></i>", "<i>X<sup>2</sup></i> C<sub>6</sub>H<sub>12</sub>"),
        ("one<sup><a href=x>1</a></sup> two", "TWO ONE<sup><a href=x>1</a></sup>"),
        ("won<wbr>der one", "ONE <wbr>WONDER"),
        ("one<b>two</b> three", "THREE <b>ONETWO</b>"),
        ("<b>one</b><sup>1</sup> two", "TWO <b>ONE</b><sup>1</sup>"),
        ("one <b>two three</b><sup>1</sup>", "<b>THREE</b><sup>1</sup> TWO ONE"),
        ("<b>one two</b> h<sub>2</sub>o", "H<sub>2</sub>O <b>TWO ONE</b>"),
        ("one<wbr><b>two</b> three", "THREE <wbr><b>ONETWO</b>"),
        ("one<!-- --><b>two</b> three", "THREE <!-- --><b>ONETWO</b>"),
        ('one<i class="x"></i>two three', 'THREE <i class="x"></i>ONETWO'),
        ("one<code>x</code>two", "TWO ONE<code>x</code>"),
        ("one<img src=x><!-- -->two", "TWO ONE<img src=x><!-- -->"),
        ("one <code>x</code><b> two</b> three", "THREE <code>x</code> <b>TWO</b> ONE"),
        ("one <code>x</code><b><i> two</i></b>", "<code>x</code> <b><i>TWO</i></b> ONE"),
        ("one <img><img><img> two", "<img><img><img> TWO ONE"),
        ("one <code>x</code><code>.y</code> two", "<code>x</code><code>.y</code> TWO ONE"),
        ("one <i class=x></i><i class=y></i> two", "<i class=x></i><i class=y></i> TWO ONE"),
        ("one <a><img></a><a><img></a> two", "<a><img></a><a><img></a> TWO ONE"),
        ("one <img> <img> two", "<img> <img> TWO ONE"),
        ("one<img><img> two", "TWO ONE<img><img>"),
        ("one <img><img>", "ONE <img><img>"),
        ("one<br>two<img> three", "ONE<br>THREE TWO<img>"),
        ("one <b>two <img></b><i> three</i>", "<i>THREE</i> <b><img> TWO</b> ONE"),
        ("one<!-- -->two", "<!-- -->ONETWO"),
        ("<b>one <code>x</code></b>, two", "TWO , <b><code>x</code> ONE</b>"),
        ("one <b>two<br></b>three", "<b>TWO ONE<br></b>THREE"),
        ("<b>one<br></b>two", "<b>ONE<br></b>TWO"),
        ("one 2<b>3<br></b>four", "<b>23 ONE<br></b>FOUR"),
        ("one two <b><i>three<br>four</i> five</b> six", "THREE TWO ONE<b><i><br>SIX FIVE FOUR</i></b>"),
        ("one<i><br>two</i> three", "ONE<i><br>THREE TWO</i>"),
        ("<span>one<br></span> <span>two<br></span>", "<span>ONE<br></span> <span>TWO<br></span>"),
        ("one (<code>x</code> two)", ") <code>x</code> TWO ( ONE"),
        ("", ""),
        ("<p> </p>", "<p> </p>"),
        ("<b>one</b> two. <i>Three</i> four.", ". TWO <b>ONE</b> . FOUR <i>THREE</i>"),
    ],
)
def test_tags_move_with_their_words(reversing, source, expected):
    assert translate_html(reversing, source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "Use <code>f()</code> (see below).",
        "Press <kbd>Ctrl</kbd> + <kbd>C</kbd> now.",
        'Call <code>f</code> "now".',
        "Press <kbd>Ctrl</kbd> <kbd>C</kbd>.",
        "Press <kbd>Ctrl</kbd> <kbd>C</kbd>",
        "Follow us: <a href=1><img></a> <a href=2><img></a>",
        "Follow us: <b><img> <img></b>",
        "<span><img> <img></span>",
        "<li><a href=1>\n  <img>\n  <img>\n</a></li>",
        "one<img> two",
        "one<img><img> two",
        "one <code>x</code><img> two",
        "(<code>x</code> [1]) one",
        "Visit <a>our site <i class=ext></i></a>.",
        "<b>the function <code>f</code></b>, which",
        "the (<a><i class=ext></i> site</a>)",
        "Cliquez « <kbd>OK</kbd> » : <img> !",
        "one <img>\n",
        " <img> one",
        "One. <img>Two. <code>x</code> <code>y</code>",
        "<p><label>Name<br><input></label> <label>City<br><input></label></p>",
        "<b>Usage:<br><code>f</code></b> prints it.",
        "<b>Usage:<br><code>f</code></b> <code>g</code>.",
        "one <b><br><img></b> two",
        "one <img><br><img> two",
        "<b>one <br></b>, two",
    ],
)
def test_copied_text_keeps_its_white_space(copying, source):
    assert translate_html(copying, source) == source


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Keys: <b><kbd>A</kbd> </b><kbd>B</kbd>", "Keys: <b><kbd>A</kbd></b> <kbd>B</kbd>"),
        ("Keys: <kbd>A</kbd><b> <kbd>B</kbd></b>.", "Keys: <kbd>A</kbd> <b><kbd>B</kbd></b>."),
        ("Share: <img><a> <img></a>", "Share: <img> <a><img></a>"),
    ],
)
def test_white_space_at_a_tag_moves_to_the_outer_element(copying, source, expected):
    assert translate_html(copying, source) == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("the function <code>f</code>, which", "the function, which"),
        ("one (<code>f</code> two)", "one (two)"),
        ("one <i class=x></i>.", "one."),
        ("one <code>x</code> .", "one ."),
        ("one<code>x</code>two", "one two"),
        ("<a>one</a><a>two</a><a><b>three</b></a>", "one two three"),
        ("<a>one</a>s <a>two</a><b>s</b>", "ones twos"),
        ("<b><a>one</a></b><a>two</a>", "one two"),
        ("one <b>two</b> , three", "one two , three"),
    ],
)
def test_text_has_the_white_space_that_it_has_without_elements(reversing, source, text):
    translate_html(reversing, source)
    assert reversing.sentences == [text]


@pytest.mark.parametrize(
    ("source", "translation", "words", "expected"),
    [
        ("one <code>x</code>, two", "two, one", (2, 1, 0), "two <code>x</code>, one"),
        ("one <code>x</code> two", "two (one)", (1, None, 0, None), "<code>x</code> two (one)"),
        ("one <code>x</code> two", "one.", (0, None), "one <code>x</code>."),
        ("press <kbd>x</kbd>, one", "按,键", (0, 1, 2), "按<kbd>x</kbd>,键"),
        ("按<kbd>x</kbd>键", "press key", (0, 1), "press <kbd>x</kbd> key"),
        ('one <code>x</code> "two"', "one „two“", (0, 1, 2, 3), "one <code>x</code> „two“"),
        ("one <code>x</code> two", "one „two“", (0, None, 1, None), "one „<code>x</code> two“"),
    ],
)
def test_element_is_separated_from_other_neighbors(copying, monkeypatch, source, translation, words, expected):
    """In the translation, other characters than in the source may precede and follow an element."""

    def translate(sentences, *_, **__):
        for sentence in sentences:
            spans = zip(words, word_spans(translation), strict=True)
            links = [(word_spans(sentence)[word], span) for word, span in spans if word is not None]
            yield {"translation_text": translation, "alignments": links}

    monkeypatch.setattr(copying, "_translate", translate)
    assert translate_html(copying, source) == expected


def random_content(rng: random.Random, depth: int = 0) -> str:
    """Return words and elements, separated by white space."""
    parts = ["one", "two", "(three)", "four,", '"five"', "+", "six.", "!", "<code>x</code>", "<img>", "<a><img></a>"]
    parts += ["<i class=x></i>", "<a> <img></a>", "<!-- -->"]
    parts += ["<b>{}</b>", "<em> {}</em>", "<span>{} </span>"] * (depth < 2)
    chosen = [rng.choice(parts) for _ in range(rng.randint(1, 6))]
    filled = [part.format(random_content(rng, depth + 1)) if "{}" in part else part for part in chosen]
    return "".join(part + rng.choice([" ", "\n"]) for part in filled).rstrip()


def visible_text(page: str) -> str:
    page = re.sub("<code>x</code>|<img>|<i class=x></i>", "@", page)
    return " ".join(re.sub("<!-- -->|</?[a-z]+>", "", page).split())


def test_random_elements_keep_their_white_space(copying):
    rng = random.Random(19)
    for _ in range(1000):
        source = f"one {random_content(rng)}"
        assert visible_text(translate_html(copying, source)) == visible_text(source), source


def test_random_elements_stay_separated_from_words(shuffling):
    rng = random.Random(23)
    for _ in range(1000):
        source = f"one {random_content(rng)}"
        text = visible_text(translate_html(shuffling, source))
        assert text.count("@") == visible_text(source).count("@")
        assert not re.search(r"[^\W_]@|@[^\W_]|@@", text), source


def test_random_elements_keep_the_lines(reversing):
    """The words of each line are those that the same page without inline elements has in this line."""
    rng = random.Random(31)
    for _ in range(500):
        source = re.sub("<img>|<code>x</code>", lambda _: rng.choice(["<br>", "two"]), f"one {random_content(rng)}")
        plain = re.sub("<(?!br>)[^<>]*>", "", source)
        lines = [
            [" ".join(line.split()) for line in re.sub("<(?!br>)[^<>]*>", "", page).split("<br>")]
            for page in (translate_html(reversing, source), translate_html(reversing, plain))
        ]
        assert lines[0] == lines[1], source


@pytest.mark.parametrize("space", ["\n", "\n\t\t", "&nbsp;", " \t ", "\n        "])
def test_white_space_inside_a_sentence_is_one_space(reversing, space):
    """Tokenizers can have no token for tabs and no-break spaces."""
    translate_html(reversing, f"<p>{space}one{space}<i>two</i>{space}three.{space}four{space}</p>")
    assert reversing.sentences == ["one two three.", "four"]


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("one <!-- c --> two", "one two", "<!-- c -->TWO ONE"),
        ("one <code>x</code> two", "one two", "<code>x</code> TWO ONE"),
        ("one <b>two </b> three", "one two three", "THREE <b>TWO</b> ONE"),
        ("one <b>two <img></b> three", "one two three", "THREE <b><img> TWO</b> ONE"),
        ("one <b><img>two </b> three", "one two three", "THREE <b><img>TWO</b> ONE"),
    ],
)
def test_white_space_on_both_sides_of_a_tag_is_one_space(reversing, source, text, expected):
    assert translate_html(reversing, source) == expected
    assert reversing.sentences == [text]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<b>one two</b><i>H2O</i><b>Foo bar baz</b>", "<b>one</b> two<i>H2O</i><b>Foo bar baz</b>"),
        ("one <b>sun</b><i>flo</i><b>wer two</b>", None),
        ("<b>one sun</b><i>flo</i>wer two", None),
    ],
)
def test_elements_that_share_a_word(copying, source, expected):
    """An element that follows a part of a word does not enclose the text before that part."""
    assert translate_html(copying, source) == (expected or source)


def test_element_does_not_contain_a_part_of_an_unrelated_word():
    text, root = InlineTreeBuilder(list(tokenize_html("<b>a b c d</b> h<sub>2</sub>o"))).build()
    translation, order = "a b h2o c d", (0, 1, 4, 2, 3)  # source words in the order of the translation
    spans = word_spans(text)
    alignments = [(spans[i], span) for i, span in zip(order, word_spans(translation), strict=True)]
    document = SimpleNamespace(translation=translation, alignments=alignments, sentences=[])
    assert TagPlacer(text, root, document).render() == "<b>a b</b> h<sub>2</sub>o c d"


@pytest.mark.parametrize(
    "source",
    [
        "<b>one <i>two</b> three</i>",
        "one</b> <i>two",
        "<p>one <b>two</p>three",
        "< one <2> </>",
        "one <![=> two",
        "&one",
    ],
)
def test_malformed_html_keeps_all_tags(reversing, source):
    found = translate_html(reversing, source)
    assert sorted(tags(found)) == sorted(tags(source))
    for word in re.findall("one|two|three", source):
        assert word.upper() in found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<b>Note <i>important<p>Text</p></i></b>", "<b><i>IMPORTANT NOTE<p>TEXT</p></i></b>"),
        (
            '<a href="1"><p>A</p>first</a> or <a href="2">second<p>B</p></a>',
            '<a href="1"><p>A</p></a><a href="2">SECOND OR FIRST<p>B</p></a>',
        ),
        ("<u>one <b>two<p>A</p>three</b> four</u>", "<u><b>TWO ONE<p>A</p>FOUR THREE</b></u>"),
    ],
)
def test_inline_elements_around_blocks_keep_their_nesting(reversing, source, expected):
    """A block divides the sentence, so one of their tags is in another sentence."""
    assert translate_html(reversing, source) == expected


def test_separated_words_keep_one_element(reversing, monkeypatch):
    """The translation of the element is split into two words at both ends of the sentence."""

    def translate(sentences, *_, **__):
        for _ in sentences:
            links = [((0, 6), (0, 8)), ((11, 14), (9, 12)), ((15, 20), (13, 18)), ((7, 10), (19, 22))]
            yield {"translation_text": "schalten das Licht aus", "alignments": links}

    monkeypatch.setattr(reversing, "_translate", translate)
    assert translate_html(reversing, "<b>switch off</b> the light") == "<b>schalten</b> das Licht aus"


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([], (0, 0)), ([-1, 0], (0, 0)), ([0, 1, 0, 1, 0], (1, 4)), ([1, -1, -1, 1, 1], (3, 5)), ([1, -1, 1], (0, 1))],
)
def test_max_sum_run(scores, expected):
    assert max_sum_run(scores) == expected


def tags(source: str) -> list[str]:
    return re.findall("<!--.*?-->|</?[a-zA-Z][^<>]*>", source)


INLINE = ["b", "i", "a", "span", "em", "u", "x-y"]
WORDS = [
    "one",
    "two",
    "Three",
    "four.",
    "five!",
    "&amp;",
    "&lt;six&gt;",
    "&#228;",
    "sieben,",
    "8",
    "我",
    "👍",
    "&nbsp;",
    "a&b",
]


def random_inline(rng: random.Random, depth: int = 0) -> str:
    """Return words, elements with unique ids, and empty elements."""
    parts = []
    for _ in range(rng.randint(0, 5)):
        kind = rng.random()
        if kind < 0.55 or depth > 3:
            parts.append(rng.choice(WORDS))
        elif kind < 0.85:
            name = rng.choice(INLINE)
            parts.append(f"<{name} id={rng.randrange(10**9)}>{random_inline(rng, depth + 1)}</{name}>")
        else:
            number = rng.randrange(10**9)
            empty = ["<br id={}>", "<img id={}>", "<!--{}-->", "<code id={}>x</code>"]
            parts.append(rng.choice(empty).format(number))
    return rng.choice(["", " ", "\n"]).join(parts)


def random_page(rng: random.Random) -> str:
    blocks = ["p", "div", "li", "td", "h1"]
    parts = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(blocks)
        parts.append(
            f"<{name} id={rng.randrange(10**9)}>{random_inline(rng)}</{name}>"
            if rng.random() < 0.8
            else random_inline(rng)
        )
    return rng.choice(["", "\n"]).join(parts)


def assert_same_tags(source: str, found: str) -> None:
    """Assert that the tags are unchanged and correctly nested."""
    assert sorted(tags(found)) == sorted(tags(source))
    unclosed = []
    for tag in tags(found):
        name = re.match("<(/?)([\\w-]*)", tag)
        if tag.startswith("<!") or name[2] in VOID:
            continue
        if not name[1]:
            unclosed.append(name[2])
        else:
            assert unclosed.pop() == name[2]
    assert not unclosed


def parents(source: str) -> dict[str, str | None]:
    """Return the parent of each element."""
    found: dict[str, str | None] = {}
    path: list[str] = []
    for tag in tags(source):
        if tag.startswith("</"):
            path.pop()
        elif not tag.startswith("<!"):
            found[tag] = path[-1] if path else None
            if re.match("<([\\w-]*)", tag)[1] not in VOID:
                path.append(tag)
    return found


def check_random_pages(translator, n: int) -> None:
    rng = random.Random(3)
    for _ in range(n):
        source = random_page(rng)
        found = translate_html(translator, source)
        assert_same_tags(source, found)
        assert parents(found) == parents(source)


def test_random_markup_keeps_all_tags(reversing):
    check_random_pages(reversing, 1_000)


def test_random_markup_with_random_model(random_translator):
    check_random_pages(random_translator, 5)


def test_random_markup_keeps_all_words(reversing):
    """The reversing pipeline translates every word."""
    rng = random.Random(5)
    for _ in range(100):
        source = random_page(rng)
        found = translate_html(reversing, source)
        texts = [re.sub("<code.*?</code>|<!--.*?-->|<[^<>]*>", " ", text) for text in (source, found)]
        expected, words = ("".join(html.unescape(text).upper().split()) for text in texts)
        assert sorted(words) == sorted(expected)


def nested_elements(rng: random.Random, depth: int) -> str:
    """Return nested elements with words before, between and after them."""
    names = [rng.choice(INLINE) for _ in range(depth)]
    parts = [
        f"<{name} id={i}>" + rng.choice(["", "", "one ", "two. "]) * (i % 100 == 0) for i, name in enumerate(names)
    ]
    return "".join([*parts, "three", *(f"</{name}>" for name in reversed(names)), " four"])


def test_deeply_nested_elements(reversing):
    rng = random.Random(17)
    for depth in (1, 990, rng.randint(2000, 4000), 5000):
        source = nested_elements(rng, depth)
        found = translate_html(reversing, source)
        assert_same_tags(source, found)
        assert parents(found) == parents(source)
        texts = ["".join(re.sub("<[^<>]*>", " ", text).upper().split()) for text in (source, found)]
        assert sorted(texts[0]) == sorted(texts[1])


def test_tokens_concatenate_to_the_source():
    rng = random.Random(9)
    pool = [
        "<",
        ">",
        "</",
        "<b>",
        "</b>",
        "<!--",
        "-->",
        "&amp;",
        "&#x;",
        "text",
        "\n",
        '"',
        "'",
        "=",
        "<br/>",
        "<script>",
    ]
    pool += ["</script>", "<![CDATA[", "]]>", "<?pi", "<!x", "é", "\x00", "<a href='", "</>", "<code>", "&", "<p", "/"]
    for _ in range(3_000):
        source = "".join(rng.choice(pool) for _ in range(rng.randint(0, 12)))
        assert "".join(token.raw for token in tokenize_html(source)) == source


def test_random_fragments(reversing):
    rng = random.Random(11)
    pool = [
        "<",
        ">",
        "<b>",
        "</b>",
        "<i>",
        "</i>",
        "<!--c-->",
        "&amp;",
        "one ",
        "two. ",
        "\n",
        "<br/>",
        "<p>",
        "</p>",
        "<code>",
    ]
    for _ in range(300):
        source = "".join(rng.choice(pool) for _ in range(rng.randint(0, 12)))
        found = translate_html(reversing, source)
        assert found.count("<!--c-->") == source.count("<!--c-->")
        assert found.count("<p>") == source.count("<p>")
