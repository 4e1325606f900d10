"""Every family, masked beside clear beside the original: the same suite for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair
from transformers import AutoModelForCausalLM

from sordino.client import connect
from sordino.shared.errors import RangeError

# Float32 attention over other shapes rounds otherwise in the last bits, and the activation scale turns that into
# steps of one quantisation unit; logits of these models are of size 10.
SHAPE_ATOL = 0.08


def tokens(pair: Pair, text: str = "the quick brown fox jumps") -> dict[str, torch.Tensor]:
    return dict(pair.masked.tokenizer(text, return_tensors="pt", return_token_type_ids=False))


def logits(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(**inputs, **options).logits
    return out


def same_unless_tied(a: torch.Tensor, b: torch.Tensor, atol: float) -> None:
    """The rule of invariant 4: logits within ``atol``, and the same choice unless the best two are closer than that."""
    assert (a - b).abs().max() <= atol
    gap = a.topk(2, -1).values
    decided = gap[..., 0] - gap[..., 1] > 2 * atol
    assert torch.equal(a.argmax(-1)[decided], b.argmax(-1)[decided])


def test_masked_logits_equal_clear_bit_for_bit(pair: Pair) -> None:
    inputs = tokens(pair)
    assert torch.equal(logits(pair.masked.model, inputs), logits(pair.clear.model, inputs))


def test_masked_greedy_equals_clear(pair: Pair) -> None:
    inputs = tokens(pair)
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    a, b = (m.generate(**inputs, **options) for m in (pair.masked.model, pair.clear.model))
    assert a.shape[1] == inputs["input_ids"].shape[1] + 12
    assert torch.equal(a, b)


@pytest.mark.parametrize("protocol", ["rlwe", "auto"])
def test_encrypted_logits_equal_clear_bit_for_bit(pair: Pair, tmp_path: Path, protocol: Any) -> None:
    pooled: dict[str, Any] = {"pool": tmp_path / "pool", "state_dir": tmp_path / "state", "refill": False}
    options = pooled if protocol == "auto" else {}
    with (link := connect(pair.target, protocol=protocol, cache=tmp_path / "cache", **options)).session:
        inputs = tokens(pair)
        assert torch.equal(logits(link.model, inputs), logits(pair.clear.model, inputs))
        options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
        a, b = (m.generate(**inputs, **options) for m in (link.model, pair.clear.model))
        assert torch.equal(a, b)


def test_close_to_the_original(pair: Pair) -> None:
    """Biases, Conv1D, fused projections, embedding scale and rotary buffers all show here."""
    original = AutoModelForCausalLM.from_pretrained(pair.original, dtype=torch.float32).eval()
    a, b = logits(pair.clear.model, tokens(pair)), logits(original, tokens(pair))
    assert torch.isfinite(a).all()
    assert b.std() > 0.1, "a flat reference would prove nothing"
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.995
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() >= 0.8


def test_batch_with_left_padding_against_single_runs(pair: Pair) -> None:
    tokenizer = pair.masked.tokenizer
    tokenizer.padding_side = "left"
    texts = ["hi", "a fox and a dog met", "once there was a long sentence that went on and on"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    together = pair.masked.model.generate(
        **batch, do_sample=False, max_new_tokens=4, min_new_tokens=4, output_logits=True, return_dict_in_generate=True
    )
    for row, text in enumerate(texts):
        alone = pair.masked.model.generate(
            **tokens(pair, text),
            do_sample=False,
            max_new_tokens=4,
            min_new_tokens=4,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for step in range(4):
            a, b = alone.logits[step][0], together.logits[step][row]
            assert torch.isfinite(b).all()
            same_unless_tied(a, b, SHAPE_ATOL)
            if alone.sequences[0, -4 + step] != together.sequences[row, -4 + step]:
                break  # a tie went the other way (checked above): what follows has another context


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # its new name is not in the lowest release
def test_cached_steps_against_one_prefill(pair: Pair) -> None:
    inputs = tokens(pair)
    whole = logits(pair.masked.model, inputs)
    ids, cache, steps = inputs["input_ids"], None, []
    for position in range(ids.shape[1]):
        with torch.inference_mode():
            out = pair.masked.model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    same_unless_tied(whole, torch.cat(steps, 1), SHAPE_ATOL)


def test_use_cache_off_gives_the_same_text(pair: Pair) -> None:
    inputs = tokens(pair)
    options = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
    on = pair.clear.model.generate(**inputs, **options, use_cache=True)
    off = pair.clear.model.generate(**inputs, **options, use_cache=False)
    for a, b, ids in zip(on.logits, off.logits, range(3), strict=True):
        same_unless_tied(a, b, SHAPE_ATOL)
        if on.sequences[0, -3 + ids] != off.sequences[0, -3 + ids]:
            break


def test_nothing_remote_stays_with_the_client(pair: Pair) -> None:
    """Each tensor that the roles see: no weight of a remote module is in the client's model, and no meta tensor."""
    names = dict(pair.masked.model.named_parameters())
    for group in pair.masked.session.manifest.groups:
        for member in group.members:
            assert f"{member.name}.weight" not in names
    assert not any(p.is_meta for p in pair.masked.model.parameters())
    assert not any(b.is_meta for b in pair.masked.model.buffers())


@pytest.mark.parametrize(
    "options",
    [{"weight_bits": 12}, {"local_layers": (0,)}, {"local_modules": ("o_proj",)}, {"remote_head": True}],
    ids=lambda options: next(iter(options)),
)
def test_split_options(make_pair: Callable[..., Pair], options: dict[str, Any]) -> None:
    pair = make_pair("llama", **options)
    inputs = tokens(pair)
    assert torch.equal(logits(pair.masked.model, inputs), logits(pair.clear.model, inputs))
    original = AutoModelForCausalLM.from_pretrained(pair.original, dtype=torch.float32).eval()
    a, b = logits(pair.masked.model, inputs), logits(original, inputs)
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.995


def test_inputs_with_nan_are_refused_before_anything_is_sent(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("llama")
    width = pair.masked.model.config.hidden_size
    before = dict(pair.masked.session.traffic.up)
    bad = torch.full((1, 2, width), float("nan"))
    with pytest.raises(RangeError, match="nothing was sent"):
        pair.masked.model(inputs_embeds=bad)
    assert pair.masked.session.traffic.up == before
    # and outliers from 1e-7 to 1e6 are fine
    wide = torch.linspace(-7, 6, 2 * width).pow(1).mul(torch.log(torch.tensor(10.0))).exp().reshape(1, 2, width)
    assert torch.isfinite(logits(pair.masked.model, {"inputs_embeds": wide})).all()


def test_learned_positions_end_with_a_clear_error(make_pair: Callable[..., Pair]) -> None:
    """GPT-2 at its last position works; one more is an error of transformers' own, and the session lives on."""
    pair = make_pair("gpt2")
    limit = pair.clear.model.config.max_position_embeddings
    ids = torch.arange(limit).remainder(200).add(10)[None]
    assert torch.isfinite(logits(pair.clear.model, {"input_ids": ids})).all()
    with pytest.raises((IndexError, ValueError)):
        logits(pair.clear.model, {"input_ids": torch.cat([ids, ids[:, :1]], 1)})
    assert torch.isfinite(logits(pair.clear.model, {"input_ids": ids[:, :3]})).all()
