"""Model configuration: `config.json` of a released checkpoint as one frozen, hashable dataclass.

Nothing else in the project parses `config.json`. Field names are those of its `text_config`; the defaults are the
values of the released DeepSeek-V4.1-Flash.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

LayerMode = Literal["window", "full", "reuse", "reindex"]

# Fields that the released file carries and that allow one value only: anything else is another model.
_FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_FIXED_TOP = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "fmt": "e4m3",
}
# Fields without influence on inference: accepted, not kept.
_IGNORED_TEXT = {"initializer_range", "use_cache"}
_IGNORED_TOP = {"transformers_version"}
_RENAMED = {"rope_parameters": "rope_scaling", "torch_dtype": "dtype"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (architecture section 3.3)."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Vision tower and image sizing (architecture section 8)."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the model. `ModelConfig()` is the released model.

    Raises:
      ValueError: a field has a value that is not allowed or contradicts another; the message names both.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    vision: VisionConfig = VisionConfig()
    quantized: bool = True
    """False for a checkpoint whose FP8 and FP4 tensors were decoded to BF16."""

    def __post_init__(self):
        _check_consistency(self)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` of a checkpoint directory.

        Raises:
          FileNotFoundError: there is no `config.json` under `path`.
          ValueError: an unknown, missing, malformed or contradictory field, by name.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"no config.json in {str(path)!r}: not a checkpoint directory")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{file}: not valid JSON: {e}") from e
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """The same from a parsed `config.json`."""
        top = _section(data, "config")
        text = _section(_take(top, "text_config", "config"), "text_config")
        vision = _section(_take(top, "vision_config", "config"), "vision_config")
        quantization = top.pop("quantization_config", None)

        _check_fixed(top, _FIXED_TOP, "config", optional={"tie_word_embeddings"})
        _check_fixed(text, _FIXED_TEXT, "text_config", optional={"dtype", "tie_word_embeddings"})
        if vision.pop("model_type", "deepseek_v41_vision") != "deepseek_v41_vision":
            raise ValueError("vision_config.model_type: only 'deepseek_v41_vision' is supported")
        if quantization is not None:
            quantization = _section(quantization, "quantization_config")
            _check_fixed(quantization, _FIXED_QUANTIZATION, "quantization_config", optional={"fmt"})
            _refuse_rest(quantization, "quantization_config", ignored=set())

        values: dict[str, Any] = {"quantized": quantization is not None}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values[name] = _token_id(_take(top, name, "config"), name)
            if text.pop(name, values[name]) != values[name]:
                raise ValueError(f"{name}: config and text_config disagree")
        values["image_token_id"] = _token_id(_take(top, "image_token_id", "config"), "image_token_id")
        values["rope_scaling"] = _rope_scaling(_take(text, "rope_scaling", "text_config"), text)
        values["vision"] = _fill(VisionConfig, vision, "vision_config")
        for field in dataclasses.fields(cls):
            if field.name not in values:
                values[field.name] = _typed(field, _take(text, field.name, "text_config"), "text_config")
        _refuse_rest(text, "text_config", _IGNORED_TEXT)
        _refuse_rest(top, "config", _IGNORED_TOP)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json` for this configuration; `from_dict` reads it back unchanged."""
        outside = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "vision", "quantized")
        text = {k: v for k, v in dataclasses.asdict(self).items() if k not in outside}
        text["rope_scaling"]["rope_type"] = "yarn"
        text = {k: list(v) if isinstance(v, tuple) else v for k, v in text.items()} | _FIXED_TEXT
        top = {name: getattr(self, name) for name in outside[:4]} | _FIXED_TOP
        top["text_config"] = text
        top["vision_config"] = {"model_type": "deepseek_v41_vision", **dataclasses.asdict(self.vision)}
        if self.quantized:
            top["quantization_config"] = _FIXED_QUANTIZATION
        return copy.deepcopy(top)

    # Layer roles (architecture section 1.2).

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry at `layer`; 0 for a window-only layer."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed entries `layer` attends to; None for a window-only layer."""
        return max(s for s in self.kv_source_layer_ids if s <= layer) if self.ratio(layer) else None

    def mode(self, layer: int) -> LayerMode:
        """How `layer` gets the positions it attends to."""
        if not self.ratio(layer):
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last source of compressed entries (section 9.4)."""
        return self.kv_source_layer_ids[-1]

    @property
    def engram_hash_columns(self) -> int:
        """Table rows looked up per token and Engram layer: (orders 2..max) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def __hash__(self) -> int:
        # jit hashes its static arguments on every call: hash the 60 fields once.
        cached = self.__dict__.get("_hash")
        if cached is None:
            cached = hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", cached)
        return cached


def _section(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {value!r}")
    value = dict(value)
    for old, new in _RENAMED.items():
        if old in value:
            if value.setdefault(new, value[old]) != value[old]:
                raise ValueError(f"{where}.{old}: contradicts {where}.{new}")
            del value[old]
    return value


def _take(section: dict[str, Any], name: str, where: str) -> Any:
    if name not in section:
        raise ValueError(f"{where}.{name}: missing")
    return section.pop(name)


def _check_fixed(section: dict[str, Any], fixed: dict[str, Any], where: str, optional: set[str]) -> None:
    for name, allowed in fixed.items():
        if name not in section and name in optional:
            continue
        value = _take(section, name, where)
        if value != allowed or type(value) is not type(allowed):
            raise ValueError(f"{where}.{name}: only {allowed!r} is supported, got {value!r}")


def _refuse_rest(section: dict[str, Any], where: str, ignored: set[str]) -> None:
    unknown = sorted(set(section) - ignored)
    if unknown:
        raise ValueError(f"{where}: unknown fields {unknown}: this program would not act on them")


def _token_id(value: Any, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"config.{name}: expected an integer, got {value!r}")
    return value


def _typed(field: dataclasses.Field, value: Any, where: str) -> Any:
    """Checks the JSON value of a field against its annotation."""
    name = f"{where}.{field.name}"
    if field.type == tuple[int, ...]:
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            raise ValueError(f"{name}: expected a list of integers, got {value!r}")
        return tuple(value)
    if value is None and field.default is None:
        return None
    number = (int,) if field.type is int else (int, float)
    if type(value) not in number:
        raise ValueError(f"{name}: expected {'an integer' if field.type is int else 'a number'}, got {value!r}")
    return value if field.type is int else float(value)


def _fill(cls: type, section: dict[str, Any], where: str) -> Any:
    values = {f.name: _typed(f, _take(section, f.name, where), where) for f in dataclasses.fields(cls)}
    _refuse_rest(section, where, ignored=set())
    return cls(**values)


def _rope_scaling(value: Any, text: dict[str, Any]) -> RopeScaling:
    section = _section(value, "text_config.rope_scaling")
    kind = section.pop("rope_type", section.get("type"))
    if kind != "yarn" or section.pop("type", kind) != kind:
        raise ValueError(f"text_config.rope_scaling.rope_type: only 'yarn' is supported, got {value!r}")
    theta = section.pop("rope_theta", None)
    if theta is not None and text.setdefault("rope_theta", theta) != theta:
        raise ValueError("text_config.rope_scaling.rope_theta: contradicts text_config.rope_theta")
    return _fill(RopeScaling, section, "text_config.rope_scaling")


def _check_consistency(c: ModelConfig) -> None:
    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ValueError(f"{field} = {getattr(c, field)!r}: {rule}")

    layers, drafts = c.num_hidden_layers, c.num_nextn_predict_layers
    positive = {f.name for f in dataclasses.fields(c) if f.type in (int, float)} - {
        "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id",
        "candidate_source_layer_id", "dspark_noise_token_id",
    }  # fmt: skip
    for name in sorted(positive):
        require(getattr(c, name) > 0, name, "must be positive")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id",
                 "dspark_noise_token_id"):  # fmt: skip
        require(
            0 <= getattr(c, name) < c.vocab_size,
            name,
            f"must be a token id below vocab_size = {c.vocab_size}",
        )

    require(len(c.compress_ratios) == layers + drafts, "compress_ratios",
            f"needs num_hidden_layers + num_nextn_predict_layers = {layers + drafts} entries")  # fmt: skip
    require(set(c.compress_ratios) <= {0, 1, 2}, "compress_ratios", "ratios are 0, 1 or 2")
    require(not any(c.compress_ratios[layers:]), "compress_ratios", "draft stages have ratio 0")
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(c, name)
        require(list(ids) == sorted(set(ids)), name, "must be ascending without repeats")
        require(bool(ids) and 0 <= ids[0] and ids[-1] < layers, name, f"must name layers 0..{layers - 1}")
    sources = c.kv_source_layer_ids
    for layer in range(layers):
        if c.ratio(layer) or layer in sources:
            before = [s for s in sources if s <= layer]
            require(bool(before) and c.ratio(before[-1]) == c.ratio(layer) > 0, "kv_source_layer_ids",
                    f"layer {layer} has ratio {c.ratio(layer)} but no source of that ratio at or below it")  # fmt: skip
    require(
        set(sources) <= set(c.index_source_layer_ids),
        "index_source_layer_ids",
        "must contain every KV source",
    )
    require(all(c.ratio(s) for s in c.index_source_layer_ids), "index_source_layer_ids", "must have ratio > 0")
    require(c.candidate_source_layer_id == sources[-1], "candidate_source_layer_id",
            f"must be the last KV source, {sources[-1]}")  # fmt: skip
    require(len(c.engram_num_embeddings) == len(c.engram_layer_ids), "engram_num_embeddings",
            "needs one row count per Engram layer")  # fmt: skip
    require(c.engram_layer_ids[-1] <= sources[-1], "engram_layer_ids",
            f"must not lie above the last KV source, {sources[-1]}")  # fmt: skip
    require(2 <= c.engram_max_ngram_size <= 4, "engram_max_ngram_size", "must be 2, 3 or 4")
    require(c.num_attention_heads % c.o_groups == 0, "o_groups", "must divide num_attention_heads")
    require(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", "exceeds n_routed_experts")
    require(c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts, "dspark_num_experts_per_tok",
            "exceeds dspark_n_routed_experts")  # fmt: skip
    for name in ("head_dim", "index_head_dim", "engram_head_dim", "hidden_size", "moe_intermediate_size"):
        require(getattr(c, name) % 32 == 0, name, "must be a multiple of the quantisation block, 32")
    require(c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
            "qk_rope_head_dim", "must be even and at most head_dim and index_head_dim")  # fmt: skip
