"""What decides which token is drawn: the distribution, the seed, penalties, and in which order filters act."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sordino.client.sampling import CountPenalty, Draw, Record, row_keys

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf]])
IDS = torch.tensor([[3, 1, 4]])


def drawn(scores: torch.Tensor, keys: list[bytes], columns: int = 3) -> list[int]:
    ids = torch.zeros((1, columns), dtype=torch.long)
    return [int(Draw([key], 3)(ids, scores)[0].argmax()) for key in keys]


def test_draws_follow_the_softmax() -> None:
    """A chi-square test over 4,000 draws; the masked token never comes. Fails by chance once in 10^6."""
    count = 4000
    seen = np.bincount(drawn(LOGITS, [key for seed in range(count) for key in row_keys(seed, 1)]), minlength=6)
    expected = count * torch.softmax(LOGITS[0].double(), dim=0).numpy()
    assert seen[5] == 0
    assert stats.chisquare(seen[:5], expected[:5] * count / expected[:5].sum()).pvalue > 1e-6


def test_draws_of_one_key_at_many_places_follow_it_too() -> None:
    [key] = row_keys(1, 1)
    seen = np.bincount([drawn(LOGITS, [key], columns)[0] for columns in range(3, 3003)], minlength=6)
    expected = 3000 * torch.softmax(LOGITS[0].double(), dim=0).numpy()
    assert stats.chisquare(seen[:5], expected[:5] * 3000 / expected[:5].sum()).pvalue > 1e-6


def test_a_draw_depends_on_its_key_and_place_alone() -> None:
    """Case 3.9: not on the rows beside it, nor on the padding before the prompt."""
    first, second = row_keys(5, 2)
    alone = Draw([first], 3)(torch.zeros((1, 7), dtype=torch.long), LOGITS)
    padded = Draw([first], 13)(torch.zeros((1, 17), dtype=torch.long), LOGITS)
    pair = Draw([second, first], 3)(torch.zeros((2, 7), dtype=torch.long), LOGITS.repeat(2, 1))
    assert torch.equal(alone, padded)
    assert torch.equal(alone[0], pair[1])
    assert not torch.equal(pair[0], pair[1])


def test_seeds() -> None:
    assert row_keys(7, 3) == row_keys(7, 3)
    assert row_keys(7, 3)[:1] == row_keys(7, 1)
    assert len({*row_keys(7, 3), *row_keys(8, 3), *row_keys(-7, 3), *row_keys(None, 3)}) == 12
    assert row_keys(None, 1) != row_keys(None, 1)


def test_repetition_penalty_divides_and_multiplies() -> None:
    """Case 3.7: a negative logit becomes less, not more."""
    out = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[0, 1]]), torch.tensor([[-1.0, 2.0, 3.0]]))
    assert out[0].tolist() == pytest.approx([-1.5, 2 / 1.5, 3.0])


def test_count_penalties_are_subtracted_for_the_answer_alone() -> None:
    ids = torch.tensor([[5, 5, 1, 2, 1]])  # the first two are the prompt
    out = CountPenalty(2, frequency=0.5, presence=0.25)(ids, torch.zeros((1, 6)))
    assert out[0].tolist() == [0, -1.25, -0.75, 0, 0, 0]


def test_temperature_never_changes_the_greedy_choice() -> None:
    for temperature in (1e-6, 0.1, 1.0, 7.0, 1e6):
        assert int(TemperatureLogitsWarper(temperature)(IDS, LOGITS).argmax()) == 0


def test_near_zero_temperature_is_near_greedy() -> None:
    """Case 3.8."""
    cold = TemperatureLogitsWarper(1e-6)(IDS, LOGITS)
    assert bool(torch.isfinite(cold[0, :5]).all())
    assert set(drawn(cold, [key for seed in range(200) for key in row_keys(seed, 1)])) == {0}


def kept(*filters: object) -> set[int]:
    out = LogitsProcessorList(filters)(IDS, LOGITS.clone())
    return {int(i) for i in torch.isfinite(out[0]).nonzero()}


def test_filters_act_on_the_distribution_after_temperature() -> None:
    """Top-k keeps the same tokens at any temperature; top-p and min-p keep more of a flatter distribution."""
    cold, hot = TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(4.0)
    assert kept(cold, TopKLogitsWarper(2)) == kept(hot, TopKLogitsWarper(2)) == {0, 1}
    assert kept(cold, TopPLogitsWarper(0.8)) == {0}
    assert kept(hot, TopPLogitsWarper(0.8)) == {0, 1, 4, 2}
    assert kept(cold, MinPLogitsWarper(0.3)) == {0}
    assert kept(hot, MinPLogitsWarper(0.3)) == {0, 1, 2, 3, 4}


def test_the_record_keeps_the_last_look_at_a_position() -> None:
    record = Record(2)
    record(IDS, torch.zeros((1, 6)))
    record(IDS, LOGITS)
    found = record.take(0, 3, 1)
    logs = torch.log_softmax(LOGITS[0], dim=0)
    assert found.value == pytest.approx(float(logs[1]))
    assert [token for token, _ in found.top] == [0, 1]
    record.forget(4)
    with pytest.raises(KeyError):
        record.take(0, 3, 1)
