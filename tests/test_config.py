"""`config.json`: the released values, what is refused, and which role each layer gets."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4jax.config import ModelConfig, RopeScaling, VisionConfig

# The released file as section 1.1 of the architecture page lists it.
RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16000000,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}
TEXT, TOP, VISION, QUANTIZATION = ("text_config",), (), ("vision_config",), ("quantization_config",)
ROPE = ("text_config", "rope_scaling")
SECTIONS = (TOP, TEXT, VISION, QUANTIZATION, ROPE)

# Fields that allow one value, with another value of the same type.
FIXED = [
    (TOP, "architectures", ["DeepseekV4ForCausalLM"]),
    (TOP, "model_type", "deepseek_v4"),
    (TOP, "dtype", "float16"),
    (TEXT, "model_type", "deepseek_v4_text"),
    (TEXT, "num_key_value_heads", 2),
    (TEXT, "hidden_act", "gelu"),
    (TEXT, "n_shared_experts", 2),
    (TEXT, "scoring_func", "sigmoid"),
    (TEXT, "topk_method", "greedy"),
    (TEXT, "norm_topk_prob", False),
    (TEXT, "attention_bias", True),
    (TEXT, "attention_dropout", 0.1),
    (TEXT, "tie_word_embeddings", True),
    (ROPE, "rope_type", "linear"),
    (VISION, "model_type", "siglip"),
    (QUANTIZATION, "quant_method", "awq"),
    (QUANTIZATION, "activation_scheme", "static"),
    (QUANTIZATION, "weight_block_size", [128, 128]),
    (QUANTIZATION, "scale_fmt", "float32"),
    (QUANTIZATION, "expert_dtype", "fp8"),
    (QUANTIZATION, "fmt", "e5m2"),
    (TOP, "tie_word_embeddings", True),
    (TEXT, "dtype", "float32"),
]
ONE_VALUE = {(path, name) for path, name, _ in FIXED}
# Accepted and without influence, or implied when missing.
MAY_BE_MISSING = {
    (TOP, "transformers_version"),
    (TOP, "quantization_config"),
    (TEXT, "initializer_range"),
    (TEXT, "use_cache"),
    (TEXT, "tie_word_embeddings"),
    (VISION, "model_type"),
}


def section(data, path):
    for name in path:
        data = data[name]
    return data


def edited(path, **fields):
    """A copy of the released file with fields of one section set."""
    data = copy.deepcopy(RELEASED)
    section(data, path).update(fields)
    return data


def without(path, name):
    data = copy.deepcopy(RELEASED)
    del section(data, path)[name]
    return data


def label(path, name):
    return ".".join((*path, name))


def fields_of(*sections):
    """(section, name) of every field of the released file that is not an object."""
    names = [(path, name) for path in sections for name in section(RELEASED, path)]
    return [(path, name) for path, name in names if not isinstance(section(RELEASED, path)[name], dict)]


# Released values.


def test_the_defaults_are_the_released_values():
    not_kept = ONE_VALUE | MAY_BE_MISSING
    holders = {TOP: ModelConfig(), TEXT: ModelConfig(), VISION: ModelConfig().vision, ROPE: ModelConfig().rope_scaling}
    expected, actual = {}, {}
    for path, name in fields_of(*holders):
        if (path, name) not in not_kept:
            value = section(RELEASED, path)[name]
            expected[label(path, name)] = tuple(value) if isinstance(value, list) else value
            actual[label(path, name)] = getattr(holders[path], name)
    assert actual == expected
    # No field besides these, the two nested ones and `quantized`.
    declared = sum(len(dataclasses.fields(c)) for c in (ModelConfig, VisionConfig, RopeScaling))
    assert declared == len(expected) + 3
    assert ModelConfig().quantized


def test_the_released_file_is_read_to_the_defaults():
    assert ModelConfig.from_dict(RELEASED) == ModelConfig()


def test_a_missing_quantization_config_means_decoded_weights():
    assert ModelConfig.from_dict(without(TOP, "quantization_config")) == ModelConfig(quantized=False)


@pytest.mark.parametrize("path, name", sorted(MAY_BE_MISSING))
def test_fields_without_influence_may_be_missing(path, name):
    config = ModelConfig.from_dict(without(path, name))
    assert dataclasses.replace(config, quantized=True) == ModelConfig()


# Round trip.


@st.composite
def configs(draw):
    """Valid configs that differ from the released one in fields of every kind."""
    count = st.integers(1, 5000)
    number = st.floats(1e-25, 1e25)
    return ModelConfig(
        vocab_size=draw(st.integers(129280, 2**31)),
        q_lora_rank=draw(count),
        swiglu_limit=draw(number),
        rms_norm_eps=draw(number),
        engram_num_embeddings=tuple(draw(st.lists(count, min_size=2, max_size=2))),
        dspark_target_layer_ids=tuple(sorted(draw(st.sets(st.integers(0, 39), min_size=1)))),
        image_token_id=draw(st.integers(0, 129279)),
        rope_scaling=RopeScaling(factor=draw(number), original_max_position_embeddings=draw(count)),
        vision=VisionConfig(patch_size=draw(count), max_wh_ratio=draw(st.none() | number)),
        quantized=draw(st.booleans()),
    )


@settings(max_examples=50)
@given(configs())
def test_to_dict_is_read_back_unchanged_through_json(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_to_dict_shares_nothing_with_other_calls():
    def containers(value):
        if isinstance(value, dict | list):
            yield id(value)
            for item in value.values() if isinstance(value, dict) else value:
                yield from containers(item)

    first, second = ModelConfig().to_dict(), ModelConfig().to_dict()
    assert not set(containers(first)) & set(containers(second)), "editing one result would change the next"


def test_from_dict_leaves_its_argument_alone():
    data = copy.deepcopy(RELEASED)
    ModelConfig.from_dict(data)
    assert data == RELEASED


# Missing, unknown and malformed fields.


REQUIRED = sorted({(path, name) for path in SECTIONS for name in section(RELEASED, path)} - MAY_BE_MISSING)


@pytest.mark.parametrize("path, name", REQUIRED, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_missing_field_is_named(path, name):
    with pytest.raises(ValueError, match=re.escape(name)):
        ModelConfig.from_dict(without(path, name))


@pytest.mark.parametrize("path", SECTIONS)
def test_unknown_fields_are_refused_at_every_level(path):
    with pytest.raises(ValueError, match="use_mla_v9"):
        ModelConfig.from_dict(edited(path, use_mla_v9=False))


FLOATS_WRITTEN_AS_INTEGERS = {"rope_theta", "compress_rope_theta", "factor", "beta_fast", "beta_slow"}


def values_of_another_type(path, name):
    released = section(RELEASED, path)[name]
    yield from ("12", {"a": 1})
    if released is not None:
        yield None
    if isinstance(released, list):
        yield released[0]
        yield from ([wrong, *released[1:]] for wrong in (None, 0.5, "12", True))
    elif (path, name) not in ONE_VALUE:
        yield from (True, [7])
        if type(released) is int and name not in FLOATS_WRITTEN_AS_INTEGERS:
            yield from (released + 0.5, float(released))


@pytest.mark.parametrize("path, name", sorted(set(fields_of(TOP, TEXT, VISION, ROPE)) - MAY_BE_MISSING))
def test_values_of_another_json_type_are_refused(path, name):
    for value in values_of_another_type(path, name):
        with pytest.raises(ValueError, match=re.escape(name)):
            ModelConfig.from_dict(edited(path, **{name: value}))


def test_a_float_may_be_written_as_an_integer():
    assert type(ModelConfig.from_dict(edited(TEXT, swiglu_limit=7)).swiglu_limit) is float


@pytest.mark.parametrize("path", SECTIONS[1:])
@pytest.mark.parametrize("value", [[], "yarn", 3])
def test_sections_must_be_objects(path, value):
    data = copy.deepcopy(RELEASED)
    section(data, path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=path[-1]):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("path, name, value", FIXED)
def test_fields_of_one_value_refuse_every_other(path, name, value):
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        ModelConfig.from_dict(edited(path, **{name: value}))
    assert "only" in str(error.value), "the message says what is allowed"


# Other spellings.


def renamed(path, old, new):
    data = copy.deepcopy(RELEASED)
    section(data, path)[new] = section(data, path).pop(old)
    return data


@pytest.mark.parametrize(
    "path, old, new",
    [(TEXT, "rope_scaling", "rope_parameters"), (TOP, "dtype", "torch_dtype"), (ROPE, "rope_type", "type")],
)
def test_old_and_new_spellings_read_the_same_and_may_not_contradict(path, old, new):
    assert ModelConfig.from_dict(renamed(path, old, new)) == ModelConfig()
    value = section(RELEASED, path)[old]
    assert ModelConfig.from_dict(edited(path, **{new: value})) == ModelConfig()
    other = value | {"factor": 4} if isinstance(value, dict) else "other"
    with pytest.raises(ValueError, match=re.escape(old)):
        ModelConfig.from_dict(edited(path, **{new: other}))
    with pytest.raises(ValueError, match=re.escape(old)):
        ModelConfig.from_dict(edited(path, **{old: other, new: value}))


def test_rope_theta_may_stand_inside_rope_parameters():
    inside = RELEASED["text_config"]["rope_scaling"] | {"rope_theta": 500.0}
    data = without(TEXT, "rope_theta")
    data["text_config"]["rope_scaling"] = inside
    assert ModelConfig.from_dict(data) == ModelConfig(rope_theta=500.0)
    with pytest.raises(ValueError, match="rope_theta"):
        ModelConfig.from_dict(edited(TEXT, rope_scaling=inside))


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_token_ids_repeated_in_text_config_may_not_contradict(name):
    assert ModelConfig.from_dict(edited(TEXT, **{name: RELEASED[name]})) == ModelConfig()
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_dict(edited(TEXT, **{name: 9}))


# Contradictions.

NUMBERS = {
    name for path, name in fields_of(TEXT) if type(section(RELEASED, path)[name]) in (int, float)
} - {name for _, name in ONE_VALUE | MAY_BE_MISSING}  # fmt: skip
TOKEN_IDS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id", "dspark_noise_token_id",
}  # fmt: skip
LAYER_LISTS = ["kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"]
RATIOS = RELEASED["text_config"]["compress_ratios"]


def contradictions():
    for name in NUMBERS - TOKEN_IDS - {"candidate_source_layer_id"}:
        yield name, {name: 0}
        yield name, {name: -1}
    for name in TOKEN_IDS:
        yield name, {name: -1}
        yield name, {name: 129280}
    for name in LAYER_LISTS:
        for ids in ((), (8, 2), (2, 2, 8), (-1, 2), (2, 40)):
            yield name, {name: ids}
    yield "compress_ratios", {"compress_ratios": tuple(RATIOS[:-1])}
    yield "compress_ratios", {"num_hidden_layers": 41}
    yield "compress_ratios", {"num_nextn_predict_layers": 2}
    yield "compress_ratios", {"compress_ratios": (*RATIOS[:5], 4, *RATIOS[6:])}
    yield "compress_ratios", {"compress_ratios": (*RATIOS[:5], -1, *RATIOS[6:])}
    yield "compress_ratios", {"compress_ratios": (*RATIOS[:-1], 1)}
    yield "kv_source_layer_ids", {"kv_source_layer_ids": (8, 14, 20)}  # nothing for layers 2 to 7
    yield "kv_source_layer_ids", {"kv_source_layer_ids": (1, 2, 8, 14, 20)}  # layer 1 has ratio 0
    yield "kv_source_layer_ids", {"kv_source_layer_ids": (2, 8, 14)}  # layer 20 has another ratio than its source
    yield "index_source_layer_ids", {"index_source_layer_ids": (2, 8, 14, 24, 28)}
    yield "index_source_layer_ids", {"index_source_layer_ids": (1, 2, 8, 14, 20)}
    yield "candidate_source_layer_id", {"candidate_source_layer_id": 14}
    yield "engram_num_embeddings", {"engram_num_embeddings": (384006168,)}
    yield "engram_max_ngram_size", {"engram_max_ngram_size": 1}
    yield "engram_max_ngram_size", {"engram_max_ngram_size": 5}
    yield "o_groups", {"o_groups": 7}
    yield "num_experts_per_tok", {"num_experts_per_tok": 385}
    yield "dspark_num_experts_per_tok", {"dspark_num_experts_per_tok": 129}
    for name in ("head_dim", "index_head_dim", "engram_head_dim", "hidden_size", "moe_intermediate_size"):
        yield name, {name: RELEASED["text_config"][name] + 16}
    yield "qk_rope_head_dim", {"qk_rope_head_dim": 63}
    yield "qk_rope_head_dim", {"qk_rope_head_dim": 130}  # more than index_head_dim
    yield "qk_rope_head_dim", {"qk_rope_head_dim": 66, "head_dim": 64}


CONTRADICTIONS = sorted(contradictions(), key=str)


@pytest.mark.parametrize("name, changes", CONTRADICTIONS, ids=str)
def test_contradictions_are_refused_by_name_and_value(name, changes):
    with pytest.raises(ValueError) as error:
        ModelConfig(**changes)
    value = changes.get(name, getattr(ModelConfig(), name))
    assert re.fullmatch(re.escape(f"{name} = {value!r}: ") + ".+", str(error.value))


def test_contradictions_are_refused_in_a_file_too():
    with pytest.raises(ValueError, match="o_groups"):
        ModelConfig.from_dict(edited(TEXT, o_groups=7))


# Layer roles, section 1.2: layers -> (ratio, mode, source of compressed entries).
ROLES = [
    ([0, 1, 40, 41, 42], 0, "window", None),
    ([2], 2, "full", 2),
    ([3, 4, 5, 6, 7], 2, "reuse", 2),
    ([8], 2, "full", 8),
    ([9, 10, 11, 12, 13], 2, "reuse", 8),
    ([14], 2, "full", 14),
    ([15, 16, 17, 18, 19], 2, "reuse", 14),
    ([20], 1, "full", 20),
    ([24, 28, 32, 36], 1, "reindex", 20),
    ([21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35, 37, 38, 39], 1, "reuse", 20),
]


def test_layer_roles_of_the_released_model():
    config = ModelConfig()
    seen = []
    for layers, *role in ROLES:
        for layer in layers:
            assert [config.ratio(layer), config.mode(layer), config.kv_source(layer)] == role, f"layer {layer}"
        seen += layers
    assert sorted(seen) == list(range(43))
    assert config.decoder_start == 20
    assert config.engram_hash_columns == 24


# Use as a static argument.


def test_configs_are_frozen():
    for config, name in (
        (ModelConfig(), "hidden_size"),
        (ModelConfig().vision, "patch_size"),
        (ModelConfig().rope_scaling, "factor"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 1)


def test_equal_configs_hash_equal_and_changed_ones_do_not():
    config, again = ModelConfig.from_dict(RELEASED), ModelConfig()
    assert hash(config) == hash(again) == hash(config)
    changed = [
        dataclasses.replace(config, swiglu_limit=7.0),
        dataclasses.replace(config, compress_ratios=(0, 2, *RATIOS[2:]), kv_source_layer_ids=(1, 2, 8, 14, 20),
                            index_source_layer_ids=(1, 2, 8, 14, 20)),
        dataclasses.replace(config, vision=VisionConfig(patch_size=16)),
        dataclasses.replace(config, rope_scaling=RopeScaling(factor=4)),
        dataclasses.replace(config, quantized=False),
    ]  # fmt: skip
    assert len({config, again, *changed}) == 1 + len(changed)
    assert len({hash(c) for c in (config, again, *changed)}) == 1 + len(changed)


# Files.


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        ModelConfig.from_checkpoint(tmp_path)
    for content in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config"):
            ModelConfig.from_checkpoint(tmp_path)


TINY_MODES = {
    "tiny_a": "window window full reuse reindex full reuse reindex full reuse reindex reuse window window window",
    "tiny_b": "window window full reuse full reindex reuse full reuse reindex reindex window window",
}


@pytest.mark.parametrize("name", TINY_MODES)
def test_tiny_checkpoints_are_read_as_written(name):
    path = Path(__file__).parent / "data" / "golden" / name / "checkpoint_quantized"
    config = ModelConfig.from_checkpoint(path)
    written = json.loads((path / "config.json").read_text())
    text = {n: tuple(v) if isinstance(v, list) else v for n, v in written["text_config"].items()}
    read = dataclasses.asdict(config)
    vision = read.pop("vision")
    assert read.pop("rope_scaling").items() <= text.pop("rope_scaling").items()
    assert read.pop("quantized")
    assert read == {n: text.get(n, written.get(n)) for n in read}
    assert vision == {n: written["vision_config"][n] for n in vision}
    assert [config.mode(i) for i in range(len(config.compress_ratios))] == TINY_MODES[name].split()
