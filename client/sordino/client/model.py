"""A transformers model whose remote linear layers go over the wire; everything else in it is transformers' own."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from sordino.client.bundle import blamed_on, read_json
from sordino.client.kernels import I32, dequantise, quantise
from sordino.client.protocols import Cost, LinearProtocol
from sordino.client.timings import Timings
from sordino.shared.errors import BundleError, RangeError
from sordino.shared.manifest import GroupSpec, ModelManifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SCALE = ".scale"
_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Largest numbers in a config.json, far above those of any model: of layers, of fractions, of all other integers.
_TOP: Final[Mapping[str, float]] = {
    "num_hidden_layers": 1024,
    "n_layer": 1024,
    "partial_rotary_factor": 1,
    "rope_theta": math.inf,
}
_MAX_SIZE: Final = 1 << 24
_ONE_AT_A_TIME: Final = threading.Lock()


class RemoteGroup:
    """Linear layers that read one input: the first one called evaluates all, the others take their part.

    "The same input" is the same tensor object, not written to meanwhile; it is held while parts are left, and kept per
    thread.
    """

    def __init__(
        self,
        spec: GroupSpec,
        protocol: LinearProtocol,
        timings: Timings,
        scales: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        self._spec = spec
        self.protocol = protocol
        self._timings = timings
        self._scale = np.ascontiguousarray(torch.cat(list(scales)).to(torch.float32).numpy())
        self._bias = np.empty(0, np.float32)
        if any(bias is not None for bias in biases):
            zeros = (torch.zeros(member.out_features) for member in spec.members)
            whole = [zero if bias is None else bias.to(torch.float32) for bias, zero in zip(biases, zeros, strict=True)]
            self._bias = np.ascontiguousarray(torch.cat(whole).numpy())
        self._ends = np.cumsum([member.out_features for member in spec.members]).tolist()
        self._held = threading.local()

    def part(self, member: int, x: torch.Tensor) -> torch.Tensor:
        """The output of one member for input ``x [..., n]``."""
        if len(self._ends) == 1:
            return self._evaluate(x)[0]
        held = self._held
        parts: dict[int, torch.Tensor] = {}
        if getattr(held, "x", None) is x and _unchanged(x, held.state):
            parts = held.parts
        if member not in parts:
            state = _state(x)
            parts = dict(enumerate(self._evaluate(x)))
            held.x, held.state, held.parts = x, state, parts
        out = parts.pop(member)
        if not parts:
            held.x = held.state = held.parts = None
        return out

    def _evaluate(self, x: torch.Tensor) -> list[torch.Tensor]:
        rows = x.detach().reshape(-1, self._spec.in_features).to(device="cpu", dtype=torch.float32).contiguous().numpy()
        count = rows.shape[0]
        if not count:
            raise RangeError(f"the input of {self._spec.name!r} has no rows: the prompt is empty, nothing was sent")
        start = time.perf_counter()
        quantised = np.empty(rows.shape, np.int32)
        scale = np.empty(count, np.float64)
        if not quantise(rows, self._spec.x_max, quantised, scale):
            raise RangeError(f"the input of {self._spec.name!r} has NaN or infinite values: nothing was sent")
        self._timings.lap("quantise", start)
        y = self.protocol.apply(self._spec, quantised)
        start = time.perf_counter()
        out = np.empty(y.shape, np.float32)
        dequantise(y, scale, self._scale, self._bias, out)
        self._timings.lap("dequantise", start)
        whole = torch.from_numpy(out).to(device=x.device, dtype=x.dtype).view(*x.shape[:-1], -1)
        if len(self._ends) == 1:
            return [whole]
        return [part.contiguous() for part in whole.tensor_split(self._ends[:-1], dim=-1)]


def _state(x: torch.Tensor) -> int | torch.Tensor:
    """By which a write to ``x`` shows: its version, or a copy where torch counts none (in inference mode)."""
    return x.clone() if x.is_inference() else x._version


def _unchanged(x: torch.Tensor, state: int | torch.Tensor) -> bool:
    return torch.equal(x, state) if isinstance(state, torch.Tensor) else x._version == state


class RemoteLinear(nn.Module):
    """Stands for an ``nn.Linear`` (or GPT-2's ``Conv1D``) whose weight stays with the server."""

    def __init__(self, group: RemoteGroup, member: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group = group
        self._member = member

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the input's dtype and on its device."""
        return self.group.part(self._member, x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Zeros:
    """Stands for the server before there is one: every product is zero."""

    name = "zeros"

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        return np.zeros((rows.shape[0], group.out_features), np.int32)

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        del group, rows
        return Cost(rounds=0, bytes_up=0, bytes_down=0, masks=0)

    def close(self) -> None:
        pass


def build_model(
    folder: Path,
    manifest: ModelManifest,
    timings: Timings,
    *,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model of a client bundle, in eval mode, whose remote products are zeros until :func:`attach`.

    Parameters are made on the meta device, so nothing remote is ever allocated; buffers (rotary frequencies, embedding
    scales) are computed for real, as transformers computes them. It is tried out before it is returned.

    Raises:
        BundleError: the config, the tensors and the manifest do not fit together; the names are listed.
    """
    chosen = f" with attn_implementation={attn_implementation!r}" if attn_implementation else ""
    with _ONE_AT_A_TIME:  # the empty model changes nn.Module, for all threads
        with blamed_on("config.json" + chosen):
            model = _empty_model(read_json(folder / "config.json"), attn_implementation)
            # Before anything is allocated, or asked of the server, for a size that the manifest states.
            _match_groups(model, manifest)
        with blamed_on("client.safetensors"):
            with safe_open(folder / "client.safetensors", framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
            _replace_remote(model, manifest, timings, tensors)
            _load_local(model, tensors)
    with blamed_on("generation_config.json"):
        model.generation_config = _generation_config(folder, model)
    model.to(device)
    model.eval()
    model.requires_grad_(False)
    with blamed_on("config.json, generation_config.json or client.safetensors"):
        _try_out(model)
    timings.clear()
    return model


def check_device(device: str | torch.device) -> None:
    """Refuses a device that this machine does not have, or that holds no numbers.

    Raises:
        RangeError: it is one of these.
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:  # the second where torch was built without it
        why = str(error).partition("\n")[0][:200]
        raise RangeError(f"device {str(device)[:40]!r} cannot be used: {why}") from None


def attach(model: PreTrainedModel, protocol: LinearProtocol) -> None:
    """Has the server compute the model's remote products from now on."""
    for module in model.modules():
        if isinstance(module, RemoteLinear):
            module.group.protocol = protocol


def load_tokenizer(folder: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a client bundle.

    Raises:
        BundleError: it cannot be loaded, or gives ids that the model does not have.
    """
    with blamed_on("the tokenizer (tokenizer.json, tokenizer_config.json)"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Published models do list added tokens, for images say, that their text part has no embedding for.
        used = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
        top, size = max(used | set(tokenizer("Aa 0\n☃")["input_ids"]), default=0), _vocabulary(model)
    if top >= size:
        raise BundleError(f"tokenizer.json has token {top}, the model has {size}: they are not of one model")
    if beyond := {index for index in tokenizer.added_tokens_decoder if index >= size}:
        _refuse_tokens(model, {index: str(tokenizer.convert_ids_to_tokens(index))[:40] for index in beyond})
    return tokenizer


def _refuse_tokens(model: PreTrainedModel, tokens: Mapping[int, str]) -> None:
    """Names what a prompt must not hold, where torch would speak of an index, or on a GPU end the process."""
    lowest = min(tokens)

    def check(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        top = int(inputs[0].max()) if inputs[0].numel() else 0
        if top >= lowest:
            raise RangeError(
                f"the tokenizer has a token {tokens.get(top, top)!r}, for which this model has no embedding (it is for "
                "images, say, and the model takes text): leave it out of the prompt"
            )

    model.get_input_embeddings().register_forward_pre_hook(check)


def _empty_model(raw: dict[str, Any], attn_implementation: str | None) -> PreTrainedModel:
    model_type = raw.pop("model_type")
    settings = _own_fields(model_type, raw)
    _check_sizes(settings)
    config = AutoConfig.for_model(model_type, **settings)
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if shared and heads % shared:
        raise BundleError(f"config.json: {heads} attention heads cannot share {shared} key and value heads")
    with init_empty_weights(include_buffers=False):
        # Only what the caller names: an implementation named by the bundle could be a kernel to fetch and run.
        chosen = {"attn_implementation": attn_implementation} if attn_implementation else {}
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **chosen)


def _check_sizes(settings: Mapping[str, Any]) -> None:
    """Refuses numbers for which building the model alone would take hours or all memory."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(value)
        elif isinstance(value, int | float):
            top = _TOP.get(name, _MAX_SIZE if isinstance(value, int) else math.inf)
            if not value <= top:  # so, too, when it is no number
                raise BundleError(f"config.json: {name[:40]} is not {top} or less")


def _try_out(model: PreTrainedModel) -> None:
    """An answer of two tokens without a server: what a setting or a tensor breaks, it breaks here."""
    prompt = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    on_gpu = model.device.type == "cuda"
    # Sampling draws on the user's random numbers: they go on as if there had been none.
    states = torch.get_rng_state(), torch.cuda.get_rng_state(model.device) if on_gpu else None
    try:
        model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, min_new_tokens=2)
    finally:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], model.device)


def _match_groups(model: nn.Module, manifest: ModelManifest) -> None:
    for spec in manifest.groups:
        for member in spec.members:
            try:
                shape = _linear_shape(model.get_submodule(member.name))
            except AttributeError as error:
                raise BundleError(f"the manifest names {member.name!r}, the model has no such module") from error
            if shape != (spec.in_features, member.out_features):
                raise BundleError(f"{member.name}: the model has shape {shape}, the manifest says otherwise")


def _replace_remote(
    model: nn.Module, manifest: ModelManifest, timings: Timings, tensors: dict[str, torch.Tensor]
) -> None:
    for spec in manifest.groups:
        scales, biases = [], []
        for member in spec.members:
            scale = tensors.pop(member.name + _SCALE, None)
            bias = tensors.pop(member.name + ".bias", None)
            for what, tensor in (("scale", scale), ("bias", bias)):
                if tensor is None or (tensor.dtype in _FLOATS and tuple(tensor.shape) == (member.out_features,)):
                    continue
                raise BundleError(
                    f"{member.name}: its {what} is {tensor.dtype} of shape {tuple(tensor.shape)}, not "
                    f"{member.out_features} floats"
                )
            if scale is None or not bool(torch.isfinite(scale).all()):
                raise BundleError(f"{member.name}: the client bundle has no finite scale for it")
            scales.append(scale)
            biases.append(bias)
        group = RemoteGroup(spec, _Zeros(), timings, scales, biases)
        for index, member in enumerate(spec.members):
            path, _, leaf = member.name.rpartition(".")
            remote = RemoteLinear(group, index, spec.in_features, member.out_features)
            setattr(model.get_submodule(path), leaf, remote)


def _linear_shape(module: Any) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    # Conv1D keeps its weight as [in, out].
    return (weight.shape[0], weight.shape[1]) if type(module).__name__ == "Conv1D" and weight is not None else None


def _load_local(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    wanted = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise BundleError(f"the client bundle has tensors that the model does not: {', '.join(unknown[:5])}")
    for name, tensor in tensors.items():
        old = wanted[name]
        if old.shape != tensor.shape:
            raise BundleError(f"{name}: shape {tuple(tensor.shape)} in the bundle, {tuple(old.shape)} in the model")
        if tensor.dtype != old.dtype and not {tensor.dtype, old.dtype} <= _FLOATS:
            raise BundleError(f"{name}: {tensor.dtype} in the bundle, {old.dtype} in the model")
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        if leaf in parent._parameters:
            parent._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            parent._buffers[leaf] = tensor
    model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    missing += [name for name, b in model.named_buffers() if b is not None and b.is_meta]
    if missing:
        raise BundleError(f"the client bundle lacks {', '.join(missing[:5])}")


# What a provider's generation_config.json may decide: which token is chosen, never how many rows travel for it
# (speculation, beams, early exits would show in the transcript) and never when an answer ends early.
_GENERATION_KEYS: Final = frozenset(
    {
        "begin_suppress_tokens",
        "bos_token_id",
        "do_sample",
        "eos_token_id",
        "min_p",
        "no_repeat_ngram_size",
        "pad_token_id",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)


def _generation_config(folder: Path, model: PreTrainedModel) -> GenerationConfig:
    path = folder / "generation_config.json"
    said = read_json(path) if path.is_file() else {}
    said = {
        f"{kind}_token_id": getattr(model.config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")
    } | said
    for key in ("bos_token_id", "pad_token_id"):
        # Old checkpoints say -1 for none. An id that has no embedding could only end an answer in an index error.
        if isinstance(said[key], int) and not 0 <= said[key] < _vocabulary(model):
            said[key] = None
    return GenerationConfig(**{key: value for key, value in said.items() if key in _GENERATION_KEYS})


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _own_fields(model_type: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The settings of ``raw`` that describe this architecture: fields its own config class declares.

    What every config may carry besides (implementations to load, plans, names) is left out, whatever it is called.
    """
    kind = type(AutoConfig.for_model(model_type))
    declared = set(inspect.signature(kind.__init__).parameters)
    for base in kind.__mro__[: kind.__mro__.index(PreTrainedConfig)]:
        declared |= set(vars(base).get("__annotations__", {}))
    general = set(PreTrainedConfig.__annotations__) | {"attn_implementation", "experts_implementation", "use_kernels"}
    allowed = {name for name in declared if not name.startswith(("_", "base_model_"))} - general
    return {name: value for name, value in raw.items() if name in allowed}
