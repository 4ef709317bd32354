"""Declarations about kinds of models, as read in their sources: no structure and no config shows them.

The order in which modules are registered does not prove the order in which they run, and a shape does not say how one
weight holds several.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Backbone:
    """The parts of a decoder in running order: names relative to the backbone. `tuples`: its layers return tuples."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    tuples: bool = False


_LLAMA = Backbone(("embed_tokens",), "layers", ("norm",))
BACKBONES = {
    "GPT2Model": Backbone(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "GPTJModel": Backbone(("wte", "drop"), "h", ("ln_f",), tuples=True),
    "CodeGenModel": Backbone(("wte", "drop"), "h", ("ln_f",), tuples=True),
    "GPTNeoModel": Backbone(("wte", "wpe", "drop"), "h", ("ln_f",), tuples=True),
    "GPTBigCodeModel": Backbone(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "MptModel": Backbone(("wte",), "blocks", ("norm_f",), tuples=True),
    "BioGptModel": Backbone(("embed_tokens", "embed_positions"), "layers", ("layer_norm",)),
    "XGLMModel": Backbone(("embed_tokens",), "layers", ("layer_norm",)),
    "PersimmonModel": Backbone(("embed_tokens",), "layers", ("final_layernorm",)),
    "StableLmModel": _LLAMA,
    "BitNetModel": _LLAMA,
    "DiffLlamaModel": _LLAMA,
    "OlmoeModel": _LLAMA,
    "PhimoeModel": _LLAMA,
    "GraniteMoeModel": _LLAMA,
    "GraniteMoeSharedModel": _LLAMA,
    "Llama4TextModel": _LLAMA,
    "HunYuanDenseV1Model": _LLAMA,
    "NemotronModel": _LLAMA,
    "HunYuanMoEV1Model": _LLAMA,
    "GraniteMoeHybridModel": _LLAMA,
    "GraniteMoeSWAModel": _LLAMA,
    "Lfm2MoeModel": Backbone(("embed_tokens",), "layers", ("embedding_norm",)),
    "GlmMoeDsaModel": Backbone(("embed_tokens",), "layers", ("norm",), tuples=True),
    "Lfm2Model": Backbone(("embed_tokens",), "layers", ("embedding_norm",)),
    "RecurrentGemmaModel": Backbone(("embed_tokens",), "layers", ("final_norm",)),
    "JambaModel": Backbone(("embed_tokens",), "layers", ("final_layernorm",)),
    "BambaModel": Backbone(("embed_tokens",), "layers", ("final_layernorm",), tuples=True),
    "FalconH1Model": Backbone(("embed_tokens",), "layers", ("final_layernorm",), tuples=True),
    "MambaModel": Backbone(("embeddings",), "layers", ("norm_f",)),
    "Mamba2Model": Backbone(("embeddings",), "layers", ("norm_f",)),
    "FalconMambaModel": Backbone(("embeddings",), "layers", ("norm_f",)),
    "FalconModel": Backbone(("word_embeddings",), "h", ("ln_f",), tuples=True),
    "BloomModel": Backbone(("word_embeddings", "word_embeddings_layernorm"), "h", ("ln_f",), tuples=True),
    "OPTDecoder": Backbone(
        ("embed_tokens", "embed_positions", "project_in"), "layers", ("final_layer_norm", "project_out")
    ),
}

#: Weights that hold several, and in which way, as read in the forward of these classes.
PACKED = {
    "Phi3Attention.qkv_proj": "packed_qkv",
    "Phi3MLP.gate_up_proj": "packed_halves",
    "GlmMLP.gate_up_proj": "packed_halves",
    "Glm4MLP.gate_up_proj": "packed_halves",
    "GPT2Attention.c_attn": "packed_qkv",
    "ModernBertAttention.Wqkv": "packed_qkv",
    "ModernBertMLP.Wi": "packed_halves",
    "ModernBertDecoderMLP.Wi": "packed_halves",
    "MptAttention.Wqkv": "packed_qkv",
    "GPTBigCodeAttention.c_attn": "packed_qkv",
    "Phi4MultimodalAttention.qkv_proj": "packed_qkv",
    "Phi4MultimodalMLP.gate_up_proj": "packed_halves",
    "Glm4vTextMLP.gate_up_proj": "packed_halves",
    "GlmOcrTextMLP.gate_up_proj": "packed_halves",
    "GraniteMoeSharedMLP.input_linear": "packed_halves",
    "GraniteMoeHybridMLP.input_linear": "packed_halves",
    "GraniteMoeSWAMLP.input_linear": "packed_halves",
    "GPTNeoXAttention.query_key_value": "colwise",  # head by head: [q k v][q k v]…
    "BloomAttention.query_key_value": "colwise",
    "DisentangledSelfAttention.in_proj": "colwise",
    "PersimmonAttention.query_key_value": "colwise",
    "FalconAttention.query_key_value": "falcon_qkv",
    "FalconFlashAttention2.query_key_value": "falcon_qkv",
}
#: Attributes with the width of all heads, which elsewhere is the name of the width of an attention's input.
HEAD_WIDTHS = {
    "AutoformerAttention": "embed_dim",
    "ClvpSelfAttention": "embed_dim",
    "DabDetrAttention": "output_dim",
    "GPTBigCodeAttention": "embed_dim",
    "GroundingDinoBiMultiHeadAttention": "embed_dim",
    "InformerProbSparseAttention": "embed_dim",
    "InternVLVisionAttention": "embed_dim",
    "JanusVisionAttention": "embed_dim",
    "MMGroundingDinoBiMultiHeadAttention": "embed_dim",
    "MvpAttention": "embed_dim",
    "QianfanOCRVisionAttention": "embed_dim",
    "SpeechT5Attention": "embed_dim",
    "VitsAttention": "embed_dim",
    "XGLMAttention": "embed_dim",
}
#: Classes that work on all heads or columns at once in a way of their own, as read in their forward.
UNSPLITTABLE = {
    "BigBirdAttention": "changes its class with the length of the rows",
    "BigBirdPegasusEncoderAttention": "changes its class with the length of the rows",
    "LongformerSelfAttention": "cuts rows into windows of its own",
    "LEDEncoderSelfAttention": "cuts rows into windows of its own",
    "PegasusXGlobalLocalAttention": "has tokens of its own beside the rows'",
    "NystromformerSelfAttention": "convolves over heads",
    "YosoSelfAttention": "does not leave padding out",
    "ProphetNetNgramSelfAttention": "attends to several streams with biases per head",
    "DiffLlamaAttention": "pairs heads",
    "TrOCRAttention": "gives what its heads compute the width of its input",
    "NeoMMEAttention": "adds embeddings to its values",
    "CanineSelfAttention": "reads two inputs",
    "DogeAttention": "makes its mask from all heads",
    "Gemma3nTextMLP": "is sparse by the mean of all its columns",
    "EomtForUniversalSegmentation": "masks all heads at once by what it predicts",
    "EomtDinov3ForUniversalSegmentation": "masks all heads at once by what it predicts",
    "VideomtForUniversalSegmentation": "masks all heads at once by what it predicts",
    "ChameleonForConditionalGeneration": "writes into its logits",
    "EncoderDecoderModel": "is two models in one",
    "VisionEncoderDecoderModel": "is two models in one",
    "SpeechEncoderDecoderModel": "is two models in one",
}

#: Models whose loss is a mean over the patches that an argument hides, as read in their forward. They divide a sum
#: by another one, which no function of torch shows.
MASKED_MEANS = dict.fromkeys(
    (f"{name}ForMaskedImageModeling" for name in ("DeiT", "FocalNet", "Swin", "Swinv2", "ViT")), "bool_masked_pos"
)

_TEXTS_AND_IMAGES = ("text_model", "vision_model")
#: Models whose loss compares each example of a batch with all others (`return_loss=True`), and the modules of which it
#: compares the `pooler_output`, as read in their forward.
PAIRED = {
    "AltCLIPModel": _TEXTS_AND_IMAGES,
    "CLIPModel": _TEXTS_AND_IMAGES,
    "ClapModel": ("text_model", "audio_model"),
    "MetaClip2Model": _TEXTS_AND_IMAGES,
    "Siglip2Model": _TEXTS_AND_IMAGES,
    "SiglipModel": _TEXTS_AND_IMAGES,
    "VisionTextDualEncoderModel": _TEXTS_AND_IMAGES,
}

#: Blocks that compute their experts, and then, of the same tokens, their `shared_experts`.
SHARED_AFTER = {
    "AXK1MoE",
    "AXK2MoE",
    "BailingHybridMoE",
    "DeepseekOcr2TextMoe",
    "DeepseekV2Moe",
    "DeepseekV3MoE",
    "DeepseekV32MoE",
    "Dots1MoE",
    "Dots3NoteTextMoE",
    "ExaoneMoeSparseMoEBlock",
    "Glm4MoeMoE",
    "Glm4MoeLiteMoE",
    "Glm4vMoeTextMoE",
    "Glm5NextTextMoE",
    "GlmMoeDsaMoE",
    "HYV4MoE",
    "KimiLinearMoE",
    "Kolibri1SparseMoeBlock",
    "Mistral4MoE",
    "MistralLarge4TextMoE",
    "NemotronHMoE",
    "SolarOpenMoE",
    "UnlimitedOcrTextMoe",
}

#: Packages whose layers are known to compute the same when they are split, or are refused by their names.
LIBRARIES = frozenset(
    ("torch", "transformers", "peft", "accelerate", "trl", "sentence_transformers", "diffusers", "timm", "torchvision")
    + ("liger_kernel", "kernels", "flash_attn", "bitsandbytes", "torchao", "hf_parallel")
)
#: Functions beside layers that scripts replace in a module of Transformers.
OF_ATTENTION = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")


def is_written_by_script(cls: type[nn.Module]) -> bool:
    """Tell whether a class's forward, or a function beside it, such as `apply_rotary_pos_emb`, is a script's own."""
    place = getattr(inspect.unwrap(cls.forward), "__module__", None) or ""
    names = {place}
    if place.startswith("transformers.models."):
        beside = (vars(sys.modules[place]).get(name) for name in OF_ATTENTION)
        names |= {one.__module__ for one in beside if isinstance(one, FunctionType)}
    return not {name.partition(".")[0] for name in names if name} <= LIBRARIES


def is_hook_of_script(hook: Any) -> bool:
    """Tell whether no library has written a hook."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    place = getattr(function, "__module__", None) or type(function).__module__
    return place.partition(".")[0] not in LIBRARIES
