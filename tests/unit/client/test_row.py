"""One answer in the making: stop texts, what is shown when, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sordino.client.answers import Row

END = 0


def row(words: Sequence[str], **options: Any) -> Row:
    """Token i is ``words[i - 1]``; 0 ends."""
    given = {"stop": (), "end_ids": frozenset({END}), "least": 0, "most": 100, **options}
    return Row(lambda ids: "".join(words[i - 1] for i in ids), **given)


def shown(answer: Row, tokens: Sequence[int]) -> list[str]:
    """The pieces, in order."""
    pieces = []
    for token in tokens:
        answer.push(token)
        if piece := answer.take(0):
            pieces.append(piece.text)
    return pieces


SPLIT = ("abc", "DEF", "G", "HI", "J", "k")


def test_no_part_of_a_stop_text_is_shown() -> None:
    """Case 3.2."""
    answer = row(SPLIT, stop=("DEFGHIJ",))
    assert shown(answer, [1, 2, 3, 4, 5]) == ["abc", ""]
    assert (answer.finish, answer.stop, answer.answer().text) == ("stop", "DEFGHIJ", "abc")
    assert len(answer.tokens) == 5


def test_what_turns_out_to_be_no_stop_text_is_shown_whole() -> None:
    """Case 3.2."""
    answer = row(SPLIT, stop=("DEFGHX",))
    assert shown(answer, [1, 2, 3, 4, 5]) == ["abc", "DEFGHI", "J"]
    answer.push(END)
    piece = answer.take(0)
    assert piece is not None
    assert (piece.text, piece.finish, answer.answer().text) == ("", "stop", "abcDEFGHIJ")


def test_text_that_cannot_begin_a_stop_text_is_shown_at_once() -> None:
    """Case 3.3: and no piece is empty before the last."""
    answer = row(("a", "b", "xa"), stop=("xyz",))
    assert shown(answer, [1, 2, 3, 1]) == ["a", "b", "xa", "a"]


def test_the_beginning_of_a_stop_text_at_the_end_of_the_answer_is_shown() -> None:
    answer = row(("ab", "xy"), stop=("xyz",), most=2)
    assert shown(answer, [1, 2]) == ["ab", "xy"]
    assert answer.finish == "length"


@pytest.mark.parametrize("stop", [(), ("never",), ("z" * 1000,)])
def test_a_stop_text_that_never_comes(stop: tuple[str, ...]) -> None:
    """Case 3.4."""
    answer = row(("n", "z"), stop=stop, most=4)
    shown(answer, [1, 2, 1, 2])
    assert (answer.answer().text, answer.finish, answer.stop) == ("nznz", "length", None)


def test_the_first_of_several_stop_texts_counts() -> None:
    answer = row(("a", "b", "c"), stop=("bc", "ab", "c"))
    shown(answer, [1, 2, 3])
    assert (answer.answer().text, answer.stop) == ("", "ab")


def test_a_stop_text_inside_one_token() -> None:
    answer = row(("say STOP now",), stop=("STOP",))
    assert shown(answer, [1]) == ["say "]
    assert answer.finish == "stop"


def test_nothing_is_taken_after_the_end() -> None:
    """Case 3.6: what a pass gave beyond the end is not part of the answer."""
    answer = row(("a",), most=2)
    shown(answer, [1, 1, 1, 1])
    assert (len(answer.answer().tokens), answer.answer().text) == (2, "aa")


def test_the_end_token_counts_and_is_not_text() -> None:
    """Case 3.6."""
    answer = row(("a",))
    shown(answer, [1, END])
    assert ([token.id for token in answer.answer().tokens], answer.answer().text) == ([1, END], "a")
    assert answer.finish == "stop"


def test_nothing_ends_an_answer_before_its_least_length() -> None:
    answer = row(("a", "b"), stop=("a",), least=3)
    shown(answer, [1, 2])
    assert answer.finish is None
    shown(answer, [1])
    assert (answer.finish, answer.answer().text) == ("stop", "ab")


def test_a_cancelled_answer_keeps_what_it_has() -> None:
    answer = row(SPLIT, stop=("DEFGHIJ",))
    shown(answer, [1, 2])
    answer.cancel()
    piece = answer.take(0)
    assert piece is not None
    assert (piece.text, piece.finish, answer.answer().text) == ("DEF", "cancelled", "abcDEF")


def test_half_a_character_waits_for_its_other_half() -> None:
    halves = {1: b"\xc3", 2: b"\xa9", 3: b"a"}
    answer = Row(
        lambda ids: b"".join(halves[i] for i in ids).decode(errors="replace"),
        stop=(),
        end_ids=frozenset(),
        least=0,
        most=9,
    )
    assert shown(answer, [3, 1, 2, 3, 1]) == ["a", "é", "a"]
    answer.cancel()
    assert answer.answer().text == "aéa�"
