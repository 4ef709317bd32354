"""A tiny model of the same class and kind as another: what a rehearsal runs in the place of the real one.

Sizes shrink by rules on the names of a config's attributes; whatever else the config says stays, so that the copy has
the same kinds of layers, positions, masks and losses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_parallel.ask.spec import get_first_line, refuse
from hf_parallel.model.anatomy import find_token_readers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY, IMAGE = 256, 32
#: Parameters of a copy beside its embeddings: more were not shrunk.
LARGEST = 40_000_000

#: Numbers of tokens, which a small vocabulary does not have.
_IDS = r".*(token_id|token_index|_start_id|_end_id|_id)"
#: The first pattern that matches the whole name gives the value of an integer (a function: from the former value).
RULES: tuple[tuple[str, Any], ...] = (
    (_IDS, lambda v: v if v < VOCABULARY else 3 + v % (VOCABULARY - 3)),
    (r"type_vocab_size", lambda v: v),
    (r"(\w*_)?vocab_size(_\w+)?|n_vocab|(src|tgt|text)_vocab_size|n_symbols", VOCABULARY),
    (r"(\w*_)?(num_key_value_heads|num_kv_heads|n_head_kv|kv_heads|kv_n_heads)", 2),
    (r"(\w*_)?(num_attention_heads|num_heads|n_heads?|attention_heads)|num_attn_heads", 4),
    (r"(n_|num_)?(routed_|local_)?experts?|(num|n)_(routed|local)_experts|moe_num_experts|ffn_num_experts", 4),
    (r".*(experts_per_tok(en)?|moe_k|top_k_experts|moe_topk|moe_top_k|num_selected_experts)|router_top_k", 2),
    (r"(n|topk|num)_groups?|num_expert_groups?|n_shared_experts", 1),
    (r"(num_)?(encoder|decoder)(_hidden)?_layers|num_(encoder|decoder)_layers", 2),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks", lambda v: min(v, 4)),
    (r"num_hash(es|_buckets)|num_buckets|relative_attention_num_buckets", lambda v: v),
    (r"(hidden_size|d_model|n_embd|n_embed|emb_dim|embed_dim|hidden_dim|dim|embedding_size|model_dim|emb_size"
     r"|word_embed_proj_dim|d_embed|decoder_hidden_size|encoder_hidden_size|d_text|true_hidden_size"
     r"|projection_dim|text_hidden_size|hidden_embed_size|cross_attention_hidden_size|pooler_hidden_size)", 64),
    (r"(moe_|shared_expert_|expert_)(intermediate|ffn_hidden|ffn)(_size|_dim)?|(moe_)?shared_.*intermediate_size", 64),
    (r"(\w*_)?(intermediate_size(_mlp)?|ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner|inner_dim"
     r"|feed_forward_(hidden_)?size|intermediate_dim|mlp_dim|feedforward_dim|dim_ff|inner_hidden_size)", 128),
    (r"(\w*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_seq_length"
     r"|max_source_positions|max_target_positions|max_length|seq_length|original_max_position_embeddings)", 64),
    (r"q_lora_rank", 32),
    (r"kv_lora_rank", 16),
    (r"qk_rope_head_dim|rotary_dim|rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"(\w*_)?(head_dim|d_kv|kv_channels|attention_head_size|head_size|d_head)", 16),
    (r"sliding_window|attention_window|attention_chunk_size|local_attention|window_size", 8),
    (r"image_size", IMAGE),
    (r"patch_size", 8),
    (r"num_mel_bins", 16),
)  # fmt: skip
FLOATS = (
    (r".*(drop|jitter).*", 0.0),
    (r"initializer_range|init_std|init_range", 0.1),
)
FIXED = {"use_cache": False}
#: Where None is the former value but no value.
NEEDED = (
    r"head_dim|vocab_size|num_experts_per_tok|n_routed_experts|num_experts|n_shared_experts|num_key_value_heads"
    r"|moe_intermediate_size"
)
#: Sizes that depend on one another in a way of the kind's own.
FITTING: dict[str, dict[str, Any]] = {
    "mpt": {"expansion_ratio": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mobilebert": {"hidden_size": 128, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "esmc": {"num_key_value_heads": 4},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8, "visual_embed": False},
    "lilt": {"hidden_size": 96, "intermediate_size": 192},
    "swin": {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]},
    "swinv2": {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    **{
        f"{name}_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        for name in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
    },
    **{
        f"{name}_text": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
                "partial_rotary_factor": 0.5,
            }
        }
        for name in ("glm4v", "glm_ocr", "glm46v", "glm4v_moe")
    },
}
#: Entries of a config that are no part of the kind of a model.
_OF_FILES = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "auto_map"),
    *("quantization_config", "model_type"),
)


class Layout(NamedTuple):
    """Numbers that a tiny model must divide by where the large one does: ranks that share heads, and stages."""

    ranks: int = 1
    stages: int = 1


ONE_RANK = Layout()


def choose_small_sizes(
    config: PretrainedConfig, keep: Sequence[str] = (), layout: Layout = ONE_RANK
) -> dict[str, Any]:
    """Return the changes to a config for a tiny model of the same kind, by name; sizes named in `keep` stay."""
    as_dict = config.to_dict()
    changes: dict[str, Any] = {}
    layers = next((as_dict[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if as_dict.get(key)), 0)
    count = 4
    if isinstance(layers, int) and (layers <= 4 or layout.stages == 1):
        count = min(layers, 4)
    elif isinstance(layers, int):  # fills all stages; one more where the large model's do not divide either
        count = min(layers, layout.stages * -(-4 // layout.stages) + bool(layers % layout.stages))
    for key, value in as_dict.items():
        part = getattr(type(config), "sub_configs", {}).get(key) and getattr(config, key, None)
        if hasattr(part, "to_diff_dict"):
            named = hasattr(type(config).sub_configs[key], "for_model")  # AutoConfig reads the kind of the part
            changes[key] = list_small_values(part, keep, layout)
            if named:
                changes[key]["model_type"] = getattr(part, "model_type", None)
        elif key in keep or ("vocab_size" in keep and re.fullmatch(_IDS, key)):
            continue
        elif key in FIXED:
            changes[key] = FIXED[key]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) or (value is None and re.fullmatch(NEEDED, key)):
            changes[key] = _choose_small_value(RULES, key, value)
        elif isinstance(value, float):
            changes[key] = _choose_small_value(FLOATS, key, value)
        elif isinstance(value, list) and isinstance(layers, int) and len(value) == layers > count:
            kinds = list(dict.fromkeys(map(str, value)))
            some = value[:count]
            changes[key] = some if set(map(str, some)) == set(kinds) else (value[: count - 1] + [value[-1]])
        elif key == "per_layer_config" and isinstance(value, dict) and isinstance(layers, int) and layers > count:
            last = max(value, key=int)  # of the kind that the last of the few layers is
            changes[key] = {
                count - 1: {name: _choose_small_value(RULES, name, size) for name, size in value[last].items()}
            }
        elif isinstance(value, dict) and "mrope_section" in value:
            changes[key] = {**value, "mrope_section": [2, 3, 3]}
    changes = _fit_to_layout(as_dict, changes, layout, count)
    changes = {key: value for key, value in changes.items() if value != as_dict.get(key)}
    if as_dict.get("kv_lora_rank"):
        changes["num_key_value_heads"] = 4
        changes.pop("head_dim", None)  # follows from the others
    fitting = FITTING.get(config.model_type, {})
    if as_dict.get("out_features") and "depths" in fitting:  # a backbone: its model reads stages by name
        stages = len(as_dict["depths"])
        fitting = {"embed_dim": 16, "depths": [1] * stages, "num_heads": [2] * stages}
    return {**changes, **fitting}


_LAYERS = r"num_hidden_layers|n_layers?|num_layers|num_blocks"
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_NO_WIDTHS = r".*(position|length|ctx|seq_len|expert).*"


def _fit_to_layout(as_dict: dict[str, Any], changes: dict[str, Any], layout: Layout, layers: int) -> dict[str, Any]:
    """Return the small sizes with as many layers and heads as a layout can cut, where it can cut the large model's."""
    if layout == ONE_RANK:
        return changes
    fitted = {key: layers if re.fullmatch(_LAYERS, key) else value for key, value in changes.items()}
    query = next((key for key in _QUERY_HEADS if isinstance(as_dict.get(key), int) and key in changes), None)
    if query is None or layout.ranks == 1 or as_dict[query] % layout.ranks:
        return fitted
    key_heads = next((key for key in _KEY_HEADS if isinstance(as_dict.get(key), int) and key in changes), None)
    if key_heads is None or as_dict[key_heads] == as_dict[query]:
        heads = kept = max(4, layout.ranks)
    else:
        large = as_dict[key_heads]
        kept = max(2, layout.ranks) if large % layout.ranks == 0 else large
        share = as_dict[query] // large
        heads = kept * next(factor for factor in range(2, share + 1) if share % factor == 0)
    for key, value in fitted.items():
        grows = _choose_small_value(RULES, key, 0) in (64, 128) and not re.fullmatch(_NO_WIDTHS, key)
        if key == key_heads:
            fitted[key] = kept
        elif isinstance(value, int) and key == query:
            fitted[key] = heads
        elif isinstance(value, int) and value in (64, 128) and grows:
            fitted[key] = value * heads // 4
    return fitted


def list_small_values(config: PretrainedConfig, keep: Sequence[str] = (), layout: Layout = ONE_RANK) -> dict[str, Any]:
    """Return all values of a tiny model's config: those that differ from the class's own, and the small sizes."""
    own = {key: value for key, value in config.to_diff_dict().items() if key not in _OF_FILES}
    if getattr(config, "kv_lora_rank", None):
        own.pop("head_dim", None)  # follows from the others
    rotation = own.get("rope_parameters") or own.get("rope_scaling")
    if isinstance(rotation, dict) and "mrope_section" not in rotation and "rope_type" in rotation:
        own.pop("rope_scaling", None)  # stretched rotations have factors for each width of a head
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": rotation.get("rope_theta", 1e4)}
    return {**own, **choose_small_sizes(config, keep, layout)}


def _choose_small_value(rules: tuple, key: str, value: Any) -> Any:
    for pattern, small in rules:
        if re.fullmatch(pattern, key):
            return small(value) if callable(small) else small
    return value


def build_random(cls: Any, config: PretrainedConfig, seed: int = 7) -> Any:
    """Build a model with weights drawn under a seed. Biases and norms get noise, or their order would not show.

    The random numbers of the caller on the host stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return model.float()


def make_small_copy(model: PreTrainedModel, keep: Sequence[str] = ()) -> PreTrainedModel:
    """Return a tiny model in fp32 on the host, of the class and the kind of `model`, which is not touched.

    Args:
        model: in any layout; only its class and config are read.
        keep: names of sizes that stay, such as `vocab_size`.

    Raises:
        SpecError: its config cannot be shrunk.
    """
    from torch.distributed.fsdp import FSDPModule

    config: Any = getattr(model, "config", None)
    cls: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    if not hasattr(config, "to_diff_dict"):
        refuse(cls.__name__, "has no config by which a small copy of it could be made", "a model of Transformers")
    try:
        small = type(config)(**list_small_values(config, keep))
        small._attn_implementation = config._attn_implementation
        with torch.device("meta"):
            rest = cls(small)
        embeddings = rest.get_input_embeddings()
        size = sum(p.numel() for p in rest.parameters()) - 2 * (0 if embeddings is None else embeddings.weight.numel())
        if size > LARGEST:
            raise ValueError(f"{size} parameters are left")
        return build_random(cls, small)
    except Exception as error:
        why = f"a small copy of it cannot be made ({type(error).__name__}: {get_first_line(error)})"
        refuse(cls.__name__, why, cause=error)


# ---- Do the outputs of a model stay the same when short documents are joined to one sequence? Tried on a small copy
# A forward that takes position_ids says nothing: models let states, convolutions or an attention of their own run on
# from one document into the next, count positions from the beginning of the sequence, or look both ways.

#: Longer than the windows, chunks and convolutions of a small copy, in fewer tokens than its positions.
LENGTHS = (19, 11, 13)
#: Relative to the largest output: sums in another order are off by 1e-6, another position or document by 1e-1.
TOLERANCE = 1e-3
#: The tolerance where flash attention wants 16 bits.
TOLERANCE_16_BITS = 5e-2


def find_reason_not_told_apart(copy: PreTrainedModel) -> str | None:
    """Return why this small model trains on other numbers when its documents are joined, or None if it does not.

    Compared are the logits of each token, and the loss with the first label of each document left out.
    """
    copy = copy.eval()
    name, tolerance = type(copy).__name__, TOLERANCE if copy.dtype == torch.float32 else TOLERANCE_16_BITS
    try:
        documents = _make_documents(copy)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            apart = [_compute_outputs(copy, document) for document in documents]
            positions = torch.cat([torch.arange(one.shape[1], device=one.device) for one in documents])[None]
            together = _compute_outputs(copy, torch.cat(documents, 1), positions)
    except Exception as error:
        return f"{name} cannot be tried on joined examples ({type(error).__name__}: {get_first_line(error)})"
    alone = torch.cat([logits for logits, _ in apart], 1)
    if together[0].shape != alone.shape or not _is_close(together[0], alone, tolerance):
        return f"{name} cannot tell examples of one row apart: its outputs for two of them are not those of each alone"
    targets = [length - 1 for length in LENGTHS]
    mean = torch.stack([loss * count for (_, loss), count in zip(apart, targets, strict=True)]).sum() / sum(targets)
    if not _is_close(together[1], mean, tolerance):
        return f"the loss of {name} is not a mean over each token's next one, which joined examples need"
    return None


def keeps_documents_apart(model: PreTrainedModel, kernel: str) -> bool:
    """Return whether attention keeps the documents of a row apart, where positions that start again begin another.

    Raises:
        Exception: of whatever kind, where no small copy of the model can be tried.
    """
    # Flash attention reads positions itself; all others read a mask.
    return "flash" in kernel or not does_read_former_document(make_small_copy(model))


def does_read_former_document(copy: PreTrainedModel) -> bool:
    """Return whether outputs of a document depend on another before it in the sequence, where positions begin anew.

    Models that do not give `position_ids` to transformers' mask functions, such as gpt-oss, read it with any kernel
    but flash attention.
    """
    backbone = find_token_readers(copy.eval())[0]
    first, second, _ = _make_documents(copy)
    positions = torch.cat([torch.arange(one.shape[1], device=one.device) for one in (first, second)])[None]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        rows = (torch.cat((before, second), 1) for before in (first, first.flip(1)))
        hidden = (backbone(input_ids=row, position_ids=positions).last_hidden_state for row in rows)
        one, other = (states[:, first.shape[1] :] for states in hidden)
    return not _is_close(one, other, TOLERANCE)


def _make_documents(copy: PreTrainedModel) -> list[torch.Tensor]:
    generator, device = torch.Generator().manual_seed(5), next(copy.parameters()).device
    highest = min(VOCABULARY, copy.get_input_embeddings().weight.shape[0]) - 8
    return [torch.randint(5, highest, (1, length), generator=generator).to(device) for length in LENGTHS]


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def _compute_outputs(
    model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and loss of one sequence."""
    labels, given = tokens.clone(), {}
    if positions is not None:
        labels[positions == 0] = -100
        given["position_ids"] = positions
    else:
        given["attention_mask"] = torch.ones_like(tokens)
    outputs: Any = model(input_ids=tokens, labels=labels, **given)
    return outputs.logits.float(), outputs.loss.float()
