"""Stop strings: what comes out is the text up to the first one, however the text is cut."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ggraph.generate.stops import Indent, Stops


def run(words: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stops = Stops(words)
    out = "".join(map(stops.push, pieces))
    return out + stops.finish(), stops.found


def truth(words: list[str], text: str) -> tuple[str, str | None]:
    """Letter by letter: the first moment at which the text ends in a word, of several the longest."""
    for end in range(1, len(text) + 1):
        done = [w for w in words if w and text[:end].endswith(w)]
        if done:
            word = max(done, key=len)
            return text[:end - len(word)], word
    return text, None


letters = st.text("ab#", max_size=5)


@given(st.lists(letters, max_size=4), st.lists(letters, max_size=8))
def test_any_cut_gives_the_same(words: list[str], pieces: list[str]) -> None:
    assert run(words, pieces) == truth(words, "".join(pieces))


@given(st.lists(letters, max_size=4), st.lists(letters, max_size=8))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(words: list[str], pieces: list[str]) -> None:
    stops = Stops(words)
    text, out = "", ""
    for piece in pieces:
        text += piece
        out += stops.push(piece)
        held = text[len(out):]
        assert stops.found is not None or not held or any(w.startswith(held) for w in words)


def test_across_borders() -> None:
    stops = Stops(["\nUser:"])
    assert [stops.push(p) for p in ("Hi", "\n", "Us", "ers", "\nUser", ": x", "y")] == ["Hi", "", "", "\nUsers", "", "", ""]
    assert stops.found == "\nUser:"
    assert stops.finish() == ""


def test_a_beginning_at_the_end_is_text() -> None:
    stops = Stops(["###"])
    assert stops.push("a##") == "a"
    assert stops.finish() == "##"


def test_no_words() -> None:
    assert run([], ["a", "b"]) == ("ab", None)
    assert run([""], ["a", "b"]) == ("ab", None)


def indented(n: int, pieces: list[str]) -> tuple[str, bool]:
    indent = Indent(n)
    return "".join(map(indent.push, pieces)), indent.short


def test_a_line_that_is_indented_less_ends_the_text() -> None:
    text = "if x:\n    a\n\t\t\t\tb\n  c\n    d"
    assert indented(4, [text]) == ("if x:\n    a\n\t\t\t\tb\n  ", True)
    assert indented(3, ["x\n", "\n   a"]) == ("x\n", True)
    assert indented(0, [text]) == (text, False)
    assert indented(2, [text]) == (text, False)
    assert indented(2, ["x\n"]) == ("x\n", False)


@given(st.integers(0, 3), st.lists(st.text("a \n", max_size=4), max_size=8))
def test_any_cut_gives_the_same_indentation(n: int, pieces: list[str]) -> None:
    assert indented(n, pieces) == indented(n, ["".join(pieces)])
