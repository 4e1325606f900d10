"""Where drafts come from, and how many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sordino.client.options import Options
from sordino.client.speculate import Chain, Ngrams, Pace, Speculator


def test_what_followed_the_longest_ngram_first_is_drafted() -> None:
    source = Ngrams(longest=3)
    assert source.propose([1, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3], 2) == [9, 1]  # "2 3" came first before 9
    assert source.propose([6, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2, 3], 2) == [8, 5]  # "1 2 3" before 8
    assert [source.evidence(ids) for ids in ([1, 2], [1, 1], [1, 2, 1, 2], [1, 2, 3, 4, 1, 2, 3, 4])] == [0, 1, 2, 3]


def test_no_ngram_no_draft() -> None:
    assert Ngrams().propose([1, 2, 3], 4) == []
    assert Ngrams().propose([1], 4) == []


def test_what_repeats_itself_goes_on_repeating() -> None:
    assert Ngrams().propose([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def test_tokens_that_were_taken_back_are_forgotten() -> None:
    source = Ngrams()
    assert source.propose([1, 2, 3, 1], 1) == [2]
    assert source.propose([1, 4, 3, 1], 1) == [4]


def test_a_chain_asks_the_next_where_one_has_no_idea() -> None:
    class Always:
        def propose(self, ids: Any, most: int) -> list[int]:
            return [7] * most

    assert Chain(Ngrams(), Always()).propose([1, 2, 3], 2) == [7, 7]
    assert Chain(Ngrams(), Always()).propose([1, 2, 1], 1) == [2]


def paced(base_s: float, row_s: float, right: int, drafted: int) -> Pace:
    """After passes of several lengths that took ``base_s + row_s * rows``, with ``right`` of ``drafted`` each."""
    pace = Pace()
    for rows in (2, 3, 5, 9, 5, 3):
        pace.passed(rows, base_s + row_s * rows)
    for _ in range(30):
        pace.judged(drafted, right)
    return pace


def test_long_round_trips_are_worth_more_drafts() -> None:
    near, far = paced(0.05, 0.01, 3, 4), paced(2.5, 0.01, 3, 4)
    assert near.choose(32) < far.choose(32)


def test_drafts_that_are_never_right_become_few() -> None:
    assert paced(0.05, 0.01, 0, 4).choose(32) == 1


def test_drafts_that_are_always_right_and_free_become_many() -> None:
    assert paced(0.05, 1e-5, 8, 8).choose(32) == 32


def test_the_best_length_is_that_of_the_formula() -> None:
    """Leviathan et al.: 1 + p + ... + p^k tokens for a + b (k + 1) seconds, over all k."""
    pace = paced(0.1, 0.02, 2, 3)
    p = pace.hit_rate()
    best = max(range(1, 33), key=lambda k: sum(p**i for i in range(k + 1)) / (0.1 + 0.02 * (k + 1)))
    assert pace.choose(32) == best


def test_more_evidence_is_worth_more_drafts() -> None:
    """Before anything is known, and by what was right of each."""
    pace = paced(0.1, 0.02, 2, 3)
    assert pace.choose(32, 0) == 0
    assert 0 < Pace().choose(32, 1) < Pace().choose(32, 2) < Pace().choose(32, 3) < 32
    for _ in range(30):
        pace.judged(4, 4, 1)
        pace.judged(1, 0, 2)
    assert pace.choose(32, 1) > pace.choose(32, 2) == 0


def test_what_was_never_right_is_tried_again_some_time() -> None:
    pace = paced(0.1, 0.02, 2, 3)
    for _ in range(30):
        pace.judged(1, 0, 1)
    assert pace.choose(32, 1) == 0
    for _ in range(60):
        pace.judged(0, 0, 1)
    assert pace.choose(32, 1) > 0


def test_times_that_jump_do_not_say_that_rows_are_free() -> None:
    """Each takes a mask: where longer passes happened to be faster, there are not 32 drafts."""
    pace = paced(0.1, -0.005, 3, 4)
    assert 0 < pace.choose(32) < 16


def speculator(**options: Any) -> Speculator:
    return Speculator(
        options=Options(speculate="ngram", **options),
        source=Ngrams(),
        guide=None,
        prompt=4,
        room=40,
        end_ids=frozenset({0}),
    )


def test_fixed_drafts_fill_every_pass() -> None:
    for ids in ([1, 2, 3, 4], [1, 2, 1, 2], [1, 1, 1, 1], [3, 0, 5, 3]):
        chosen = speculator(draft_tokens=5, fixed_drafts=True)
        out, logits = chosen.get_candidates(torch.tensor([ids]))
        assert logits is None
        assert out.shape == (1, 9)
        assert out[0, :4].tolist() == ids


def test_nothing_is_drafted_after_an_end_token() -> None:
    out, _ = speculator(draft_tokens=3).get_candidates(torch.tensor([[3, 4, 0, 5, 3]]))
    assert out[0, 5:].tolist() == [4]


@pytest.mark.parametrize("columns", [37, 38, 39])
def test_drafts_stay_inside_the_answer(columns: int) -> None:
    """One pass gives one token more than it has drafts."""
    out, _ = speculator(draft_tokens=8).get_candidates(torch.ones((1, columns), dtype=torch.long))
    assert out.shape[1] == 39


def test_counts_add_up() -> None:
    chosen = speculator(draft_tokens=2)
    chosen.get_candidates(torch.tensor([[1, 2, 1, 2]]))
    chosen.update_candidate_strategy(torch.tensor([[1, 2, 1, 2, 1, 9]]), torch.zeros(1), 1)
    chosen.get_candidates(torch.tensor([[1, 2, 1, 2, 1, 9]]))
    chosen.update_candidate_strategy(torch.tensor([[1, 2, 1, 2, 1, 9, 3]]), torch.zeros(1), 0)
    counts = chosen.counts
    assert (counts.passes, counts.drafted, counts.accepted, counts.rows) == (1, 2, 1, 4 + 2 + 1)
    assert counts.acceptance == 0.5
