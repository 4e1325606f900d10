"""Every strategy of decoding over two real processes: the tokens, text and probabilities of an answer in clear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import ServerProcess, connect_to

from sordino.client import Connected
from sordino.client.answers import Answers, Generation
from sordino.client.options import Options
from sordino.client.terminal import encode_prompt

PROMPT = "the quick brown fox, the quick brown dog, the quick"
TOKENS = 20

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "cold": {"temperature": 1e-6, "seed": 3},
    "top-k, top-p, min-p": {"temperature": 1.3, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "three answers": {"temperature": 1.0, "seed": 3, "n": 3},
    "beams": {"beams": 3, "n": 2, "temperature": None},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bad words and biases": {"bad_words": ("th", "e"), "logit_bias": {40: 5.0, 41: -100.0}},
    "logprobs": {"logprobs": 3},
    "n-gram drafts": {"speculate": "ngram"},
    "as many drafts in every round": {"speculate": "ngram", "draft_tokens": 3, "fixed_drafts": True},
    "sampled, with drafts": {"speculate": "ngram", "temperature": 1.0, "seed": 3},
    "padded": {"pad_prompt": 64},
    "of one length": {"fixed_length": True, "stop": ("e",)},
}


@pytest.fixture(scope="module")
def links(clear_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Connected]]:
    folder = tmp_path_factory.mktemp("strategies")
    found = {name: connect_to(clear_server, folder, protocol=name, batch=1024) for name in ("masked", "clear")}
    yield found
    for link in found.values():
        link.session.close()


def run(link: Connected, **options: Any) -> Answers:
    given = {"max_tokens": TOKENS, "temperature": 0, "end_ids": (), **options}
    return Generation(link, encode_prompt(link, PROMPT, raw=True), Options(**given)).run()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masked_answers_are_those_in_clear(links: dict[str, Connected], strategy: str) -> None:
    options = STRATEGIES[strategy]
    masked, clear = run(links["masked"], **options), run(links["clear"], **options)
    assert masked.answers == clear.answers
    if "draft_tokens" in options:  # left out, their number follows measured times
        assert masked.speculation == clear.speculation
    assert masked.answers[0].tokens


@pytest.mark.parametrize(
    ("protocol", "attention"), [("auto", "local"), ("rlwe", "local"), ("masked", "rlwe"), ("rlwe", "rlwe")]
)
def test_drafts_draws_and_beams_with_every_protocol_and_attention(
    clear_server: ServerProcess, links: dict[str, Connected], tmp_path: Path, protocol: str, attention: str
) -> None:
    """Encrypted pages are cropped when drafts were wrong, and shared by beams."""
    folders = {} if protocol == "rlwe" else {"pool": tmp_path / "pool", "state_dir": tmp_path / "client-state"}
    pages = {"page_tokens": 8} if attention == "rlwe" else {}
    link = connect_to(
        clear_server, tmp_path, protocol=protocol, attention=attention, refill=protocol == "masked", **pages, **folders
    )
    with link.session:
        for options in (
            {"speculate": "ngram", "draft_tokens": 3},
            {"speculate": "ngram", "draft_tokens": 3, "temperature": 1.0, "seed": 5},
            {"beams": 2, "temperature": None},
        ):
            hidden, clear = (run(side, max_tokens=8, **options) for side in (link, links["clear"]))
            assert [answer.text for answer in hidden.answers] == [answer.text for answer in clear.answers]
