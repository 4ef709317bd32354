"""Tensor parallelism (Shoeybi et al., 2019), sequence parallelism between its regions (Korthikanti et al., 2022)."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from hf_parallel.ask.keys.pipeline import AUTO_SCHEDULE, SPLIT_BACKWARD
from hf_parallel.ask.spec import SpecError, refuse
from hf_parallel.axes.axis import Axis, SequenceParallelFlag
from hf_parallel.axes.tensor.grid import Grid
from hf_parallel.axes.tensor.infer import (
    LINEARS,
    find_latent_attention,
    find_packed_weight_style,
    find_shared_mlp_styles,
    find_tensors_by_heads,
    get_linear_sizes,
    infer_styles,
    is_attention,
    iterate_named_layers,
)
from hf_parallel.axes.tensor.layer_sums import sum_by_layer
from hf_parallel.axes.tensor.region import READ_BESIDES, READERS, does_read_features
from hf_parallel.axes.tensor.sequence_parallel import (
    apply_sequence_parallel,
    find_sequence_obstacle,
    pad_sequences_of_reader,
)
from hf_parallel.axes.tensor.tensor_parallel import (
    FOR_LINEARS,
    SAME_AS_LINEAR,
    apply_tensor_parallel,
    retie,
    split_experts,
)
from hf_parallel.axes.tensor.vocab_parallel import apply_vocab_parallel, make_logits_whole
from hf_parallel.axes.tensor.whole_layers import REPLACED, WHOLE
from hf_parallel.model.anatomy import (
    does_draw_random_numbers,
    find_text_part,
    find_ties_of_script,
    find_token_readers,
    get_text_config,
    is_norm,
    list_tied_to_embedding,
    list_transformer_blocks,
    read_attention_heads,
)
from hf_parallel.model.calls import get_tokens_of
from hf_parallel.model.experts import ExpertFacts, is_experts, iterate_experts, read_expert_facts
from hf_parallel.model.families import UNSPLITTABLE, is_written_by_script
from hf_parallel.ranks import join_sequence
from hf_parallel.ranks.devices import find_memory_obstacle
from hf_parallel.ranks.local import hook_gradients_of_scalars, make_gradient_whole
from hf_parallel.ranks.mesh import list_axis_ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.model.calls import Batch


# ---- Which module gets which tensor-parallel style: the model's own plan, else inferred; checked against its sizes
# A style is a word; `tensor_parallel.py` and `vocab_parallel.py` know what it does. The words are those of
# transformers' `tp_plan` where it has one. `read_split` looks at the model, `resolve_styles` only at what it found.


#: Words of transformers' plans that this version can apply.
SUPPORTED = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
}
#: transformers' own answer to packed weights is to compute them whole; where the packing is known we split them.
_WHOLE = {"colwise_gather_output": "packed", "rowwise_split_input": "rowwise"}
_OF_KEYS = (".k_proj", ".v_proj")
_APART = (".q_proj", *_OF_KEYS)
#: The styles of layers that hold keys, where ranks share heads.
_SHARED = {"packed_qkv": "shared_qkv", "falcon_qkv": "shared_groups"}
#: Inputs of attentions that only models with an encoder give.
_OF_DECODERS = ("key_value_states", "encoder_hidden_states")
_OF_VOCABULARY = ("embedding_rowwise", "colwise_gather_output")

Origins = dict[str, tuple[str, str]]  # module -> style and where it comes from: "plan", "inferred" or "known"


#: Models whose loss pulls the scores of their first heads to the diagonal, where their config says so.
GUIDED_BY_HEADS = {"SpeechT5ForTextToSpeech", "SpeechT5ForSpeechToSpeech"}


@dataclass(frozen=True)
class SplitFacts:
    """The splits that a model's modules allow. `refusal`: why none is split, whatever the number of ranks."""

    model: str
    heads: tuple[int, int] | None  # query, key/value
    refusal: str | None = None
    key_heads: frozenset[int] = frozenset()  # of the layers, where they have unlike numbers (MiMo V2)
    styles: Origins = field(default_factory=dict)
    kinds: dict[str, type] = field(default_factory=dict)
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)  # input and output width
    transposed: frozenset[str] = frozenset()  # whose weight is [in, out]
    of_script: frozenset[str] = frozenset()  # whose class no library has written
    sparse_lookups: frozenset[str] = frozenset()  # embeddings whose gradient or norm is one of rows
    kept_per_head: str | None = None  # an attention that keeps something for each head, and what it keeps
    norm_over_keys: str | None = None  # an attention with a norm over all key heads at once
    sequence_obstacle: str | None = None
    experts: dict[str, ExpertFacts] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)  # weights that a script has tied, and the name of the first
    draws: bool = False  # do layers draw random numbers in training?
    grid_obstacle: str | None = None  # why products of it cannot be cut along both dims; looked at if that is asked
    memory_obstacle: str | None = None  # why ranks cannot reach each other's memory; looked at if that is asked


def read_split(model: nn.Module, on_grid: bool = False) -> SplitFacts:
    """Read which module can have which style, whatever the number of ranks, and what limits that number.

    Args:
        on_grid: look also for what a grid of ranks cannot cut.
    """
    heads, name = read_attention_heads(model), type(model).__name__
    kinds = (type(module).__name__ for module in model.modules())
    reason = next((f"{kind} {UNSPLITTABLE[kind]}" for kind in kinds if kind in UNSPLITTABLE), None)
    if getattr(model.config, "use_guided_attention_loss", False) and name in GUIDED_BY_HEADS:
        reason = f"the loss of {name} reads the scores of some heads (use_guided_attention_loss=True)"
    layers = [layer for _, layer in iterate_named_layers(model)]
    if len({id(layer) for layer in layers}) < len(layers):
        reason = f"{name} has one layer in several places, which would be split several times"
    if reason is not None or heads is None:
        return SplitFacts(name, heads, reason)
    try:
        styles = _find_styles(model)
    except SpecError as error:
        return SplitFacts(name, heads, str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}")
    modules = {key: model.get_submodule(key) for key, (style, _) in styles.items() if style != "heads"}
    lookups = {key: module for key, module in modules.items() if isinstance(module, nn.Embedding)}
    columns = [key for key, (style, _) in styles.items() if style == "colwise"]
    words = {key: style for key, (style, _) in styles.items()}
    attentions = map(model.get_submodule, {key.rpartition(".")[0] for key in columns})
    groups = {getattr(module, "num_key_value_groups", None) for module in attentions}
    key_heads = frozenset(heads[0] // size for size in groups if isinstance(size, int) and size > 0)
    linears = {key: get_linear_sizes(module) for key, module in modules.items() if isinstance(module, LINEARS)}
    sparse = (key for key, e in lookups.items() if e.max_norm is not None or e.scale_grad_by_freq or e.sparse)
    return SplitFacts(
        name,
        heads,
        key_heads=key_heads if len(key_heads) > 1 else frozenset(),
        styles=styles,
        kinds={key: type(module) for key, module in modules.items()},
        linears=linears,
        transposed=frozenset(key for key, module in modules.items() if isinstance(module, Conv1D)),
        of_script=frozenset(key for key, module in modules.items() if is_written_by_script(type(module))),
        sparse_lookups=frozenset(sparse),
        kept_per_head=_find_kept_per_head(model, columns, heads),
        norm_over_keys=_find_norm_over_keys(model, columns),
        sequence_obstacle=find_sequence_obstacle(model, words),
        experts={key: read_expert_facts(module) for key, module in modules.items() if is_experts(module)},
        ties=find_ties_of_script(model),
        draws=any(does_draw_random_numbers(block) for block in list_transformer_blocks(model)),
        grid_obstacle=_find_grid_obstacle(model, words) if on_grid else None,
    )


def _find_styles(model: PreTrainedModel) -> Origins:
    plan = {key: word for key, word in (getattr(model, "tp_plan", None) or {}).items() if word != "local_params"}
    latent = find_latent_attention(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = {id(module) for module in find_text_part(model).modules()}
    published = _read_plan_styles(model, plan, head, inside, {name.rpartition(".")[0] for name in latent})
    styles = {name: (style, "plan") for name, style in published.items()}
    if not latent and not any(style in ("colwise", "rowwise") for style, _ in styles.values()):
        styles.update({name: (style, "inferred") for name, style in infer_styles(model).items()})
    split = {name.rpartition(".")[0] for name in (*styles, *latent)}
    # Embeddings and head, which several plans leave out.
    embeddings = list_tied_to_embedding(model)
    vocabulary = dict.fromkeys(embeddings, "embedding_rowwise")
    vocabulary |= dict.fromkeys(_list_heads(model, head, embeddings), "colwise_gather_output")
    for known in (
        latent,
        vocabulary,
        find_tensors_by_heads(model, split),
        # Experts side by side in one module, each of which is split inside.
        {name: "experts" for name, module in iterate_experts(model) if id(module) in inside},
        find_shared_mlp_styles(model),
    ):
        styles.update({name: (style, "known") for name, style in known.items() if name not in styles})
    # Some forwards read the embedding's weight itself. Gemma 4's does for the layers' own inputs, heads too.
    kinds = {type(module).__name__ for module in model.modules()}
    by_layer = "Gemma4Model" in kinds and bool(getattr(get_text_config(model), "hidden_size_per_layer_input", 0))
    if by_layer or not kinds.isdisjoint({"DebertaLMPredictionHead", "DebertaV2LMPredictionHead"}):
        styles = {name: found for name, found in styles.items() if found[0] not in _OF_VOCABULARY}
    return styles


def _list_heads(model: nn.Module, head: nn.Module | None, embeddings: list[str]) -> list[str]:
    """Return the names of the head and of linears tied to an embedding, which BLIP has and does not call its head."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {f"{name}.weight" for name in embeddings}
    shared = {target for target, source in tied.items() if source in sources}
    linears = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
    return [name for name, module in linears if module is head or f"{name}.weight" in shared]


def resolve_styles(facts: SplitFacts, tp_size: int, whole_experts: bool = False) -> Origins:
    """Return style and origin of each module that is split over `tp_size` ranks, by full name.

    Args:
        whole_experts: another axis shares experts out, each of them whole.

    Raises:
        SpecError: the model cannot be split, or a size does not divide.
    """
    asked, works = f"tp_size={tp_size}", "tp_size=1"
    if facts.refusal is not None:
        refuse(asked, facts.refusal, works)
    if facts.heads is None:
        refuse(asked, f"{facts.model} publishes no tensor-parallel plan and has no attention heads to split", works)
    heads, kv_heads = facts.heads
    sizes = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    counts = str(kv_heads)
    if facts.key_heads:  # ranks that share a head in one layer would have several in another
        sizes = [n for n in sizes if all(number % n == 0 for number in facts.key_heads)]
        counts = " or ".join(map(str, sorted(facts.key_heads)))
    if tp_size not in sizes:
        choice = f"tp_size={' or '.join(map(str, sizes))}" if sizes else works
        refuse(asked, f"does not divide {heads} attention heads and {counts} key/value heads", choice)
    styles = facts.styles
    if tp_size > kv_heads:  # ranks share heads
        keys = {name for name, (style, _) in styles.items() if style == "colwise" and name.endswith(_OF_KEYS)}
        styles = {
            name: ("colwise_shared_heads" if name in keys else _SHARED.get(style, style), origin)
            for name, (style, origin) in styles.items()
        }
        if facts.norm_over_keys is not None and any(style == "colwise_shared_heads" for style, _ in styles.values()):
            refuse(asked, f"{facts.norm_over_keys} has a norm over all key heads", f"tp_size={kv_heads}")
    styles = {
        name: (f"{WHOLE}{style}" if name in facts.of_script and style in REPLACED else style, origin)
        for name, (style, origin) in styles.items()
    }
    for name, (style, _) in styles.items():
        _check_layer(facts, name, style, tp_size)
    if whole_experts:
        styles = {name: found for name, found in styles.items() if found[0] != "experts"}
    for name in (name for name in styles if name in facts.experts):
        experts = facts.experts[name]
        if experts.unknown:
            refuse(asked, f"what {experts.kind} does with its {experts.unknown[0]} is not known", works)
        if experts.width % tp_size:
            refuse(asked, f"does not divide the {experts.width} columns of each expert of {name}", works)
    if facts.kept_per_head is not None:
        refuse(asked, facts.kept_per_head, works)
    return styles


def _read_plan_styles(
    model: nn.Module, plan: dict[str, str], head: nn.Module | None, inside: set[int], latent: set[str]
) -> dict[str, str]:
    """Return the plan's style of each module; latent attentions are left out, which we cut in our own way."""
    styles = {}
    named = [(name, module, re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, module in model.named_modules()]
    matches = [(name, module, plan[key]) for name, module, key in named if plan.get(key) is not None]
    split = {name.rpartition(".")[0] for name, _, word in matches if word.startswith("rowwise")}
    for name, module, word in matches:
        owner, _, child = name.rpartition(".")
        if id(module) not in inside and module is not head:
            continue  # the vision part of a composite model stays whole
        if is_experts(module) or owner in latent:
            continue
        if word == "colwise_gather_output" and module is not head and owner not in split:
            continue  # no layer follows that would split it: all of it stays whole
        style = word if module is head else _WHOLE.get(word, word)
        if module is not head and style in ("packed", "colwise"):
            style = find_packed_weight_style(model.get_submodule(owner), child) or style
        if style == "packed" and name.endswith(_APART):
            style = "colwise"  # gathered for a norm over all heads, which `SplitNorm` does
        if style not in SUPPORTED and not style.startswith("packed_"):
            refuse(f"style {word} of {name}", "is not supported")
        styles[name] = style
    return styles


def _find_kept_per_head(model: nn.Module, columns: Iterable[str], heads: tuple[int, int]) -> str | None:
    """Find an attention that keeps a module or a vector for each head, of which ranks would take the first ones.

    StableLM 2 has such norms; attentions with Transformer-XL's relative positions (Dai et al., 2019, section 3.3) add
    such vectors to their queries.
    """
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in columns):
        attention = model.get_submodule(owner)
        if not is_attention(attention):
            continue
        for module in attention.modules():
            if isinstance(module, nn.ModuleList | nn.ParameterList) and len(module) > 1 and len(module) in heads:
                return f"{owner} keeps a module for each head"
        widths = {get_linear_sizes(child)[1] for child in attention.children() if isinstance(child, LINEARS)}
        for name, parameter in attention.named_parameters(recurse=False):
            if parameter.ndim == 2 and len(parameter) in heads and parameter.numel() in widths:
                return f"{owner} keeps a vector for each head in {name}"
    return None


def _find_norm_over_keys(model: nn.Module, columns: Iterable[str]) -> str | None:
    """Find an attention with a norm over all its keys, of which a rank would have one head; return its class."""
    for name in columns:
        module, owner = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        if not name.endswith(_OF_KEYS) or not isinstance(module, LINEARS):
            continue
        whole = get_linear_sizes(module)[1]
        widths = {p.numel() for norm in owner.modules() if is_norm(norm) for p in norm.parameters()}
        if whole in widths and whole > getattr(owner, "head_dim", whole):
            return type(owner).__name__
    return None


def _find_grid_obstacle(model: nn.Module, styles: dict[str, str]) -> str | None:
    """Find an attention or MLP that may do more with its input than to multiply it by weights that are cut.

    On a grid a module is given a part of the input's features.
    """
    layers = {name for name, _ in iterate_named_layers(model)}
    for name in dict.fromkeys(key.rpartition(".")[0] for key, style in styles.items() if style in READERS):
        owner = model.get_submodule(name)
        if name in layers:
            continue  # each of its linears enters by itself
        first, *parameters = inspect.signature(owner.forward).parameters
        whole = [key for key, child in owner.named_children() if isinstance(child, LINEARS)]
        whole = [key for key in whole if styles.get(f"{name}.{key}", "") not in (*READERS, "rowwise")]
        if whole:
            return f"{name}.{whole[0]} stays whole and may read what is cut"
        for key in [first, *(key for key in parameters if key in READ_BESIDES)]:
            read = does_read_features(owner, key)
            if read or (read is None and key not in _OF_DECODERS):
                return f"{type(owner).__name__} may do more with {key} than multiply it"
    return None


def check_grid(facts: SplitFacts, styles: Origins, config: ParallelConfig) -> None:
    """Refuse a grid that does not fit the model's sizes, or code that may read what it cuts.

    Raises:
        SpecError: it names a grid that works, or tp without one.
    """
    asked, cols = f"tp_mesh={config.tp_mesh}", config.tp_col_size
    works = f"tp={config.tp_size} without tp_mesh"
    if facts.grid_obstacle is not None:
        refuse(asked, facts.grid_obstacle, works)
    for name, (style, _) in styles.items():
        if style in ("shared_qkv", "shared_groups"):
            refuse(asked, f"ranks share keys that {name} holds beside queries", works)
        if style.startswith(WHOLE):
            refuse(asked, f"{name} is a layer of the script, which stays whole", works)
        if name not in facts.linears or style not in (*READERS, "rowwise"):
            continue
        width = facts.linears[name][style == "rowwise"]
        if width % cols:
            fits = max(n for n in range(1, cols) if width % n == 0 and config.tp_size % n == 0)
            shape = f"tp_mesh={config.tp_size // fits}x{fits}" if fits > 1 else works
            refuse(asked, f"{cols} columns do not divide {width} features of {name}", shape)
        if style == "colwise_shared_heads" and facts.linears[name][1] % config.tp_size:
            why = f"{config.tp_size} ranks do not divide {facts.linears[name][1]} features of {name}"
            refuse(asked, why, works)


def _check_layer(facts: SplitFacts, name: str, style: str, tp_size: int) -> None:
    """Refuse a width that ranks do not divide, and a subclass, which may compute something else than the style."""
    asked = f"tp_size={tp_size}"
    if style in ("colwise", "rowwise") and name in facts.linears:
        width = facts.linears[name][style == "colwise"]
        if width % tp_size:
            side = "output" if style == "colwise" else "input"
            refuse(asked, f"does not divide the {width} {side} features of {name}", "tp_size=1")
    kind = facts.kinds.get(name)
    if kind is None:  # a parameter, not a module
        return
    allowed = (nn.Linear,) if style.startswith("shared_") else LINEARS
    if style in FOR_LINEARS and kind not in allowed and kind.__name__ not in SAME_AS_LINEAR:
        refuse(asked, f"{name} is a {kind.__name__}, but style {style} is for Linear", "tp_size=1")
    is_head = style == "colwise_gather_output"
    if is_head and kind is not nn.Linear or style == "embedding_rowwise" and not issubclass(kind, nn.Embedding):
        wanted = "a Linear" if is_head else "an Embedding"
        refuse(asked, f"{name} is a {kind.__name__}, not {wanted}", "tp_size=1")
    if style == "embedding_rowwise" and name in facts.sparse_lookups:
        refuse(name, "with max_norm, scale_grad_by_freq or sparse it cannot be split", "tp_size=1")


@dataclass(frozen=True)
class TensorPart:
    """The part of tp in a plan: style and origin by module name; why there is no sequence parallelism, or None."""

    styles: dict[str, tuple[str, str]]
    whole_sequences: str | None
    overlap: bool
    sums_over_tokens: bool
    facts: SplitFacts
    grid: tuple[int, int] | None = None  # rows and columns of its ranks
    fused: bool = False  # are products and collectives one operation over symmetric memory?

    @property
    def words(self) -> dict[str, str]:
        """Return the style of each module that is split."""
        return {name: style for name, (style, _) in self.styles.items()}

    @property
    def why_not_compiled(self) -> tuple[str, str] | None:
        """Return why layers cannot be graphs with their collectives inside, and what works instead."""
        if self.facts.draws and self.whole_sequences is not None:
            why = "with tp and whole sequences, ranks draw dropout from random states of their own inside layers"
            return why, "a dropout of 0"
        return None


class Tensor(Axis["SplitFacts", TensorPart]):
    """Splits matrices by columns and rows, the embedding and the head by rows of the vocabulary."""

    name = "tp"
    inside = True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> SplitFacts:
        """Read which module could be split how."""
        facts = read_split(model, config.tp_col_size > 1)
        if config.tp_overlap and config.compile != "none":
            return replace(facts, memory_obstacle=find_memory_obstacle(config.tp_size))
        return facts

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: SplitFacts) -> TensorPart:
        """Choose styles that fit the number of ranks, and whether sequences are split between regions."""
        styles = resolve_styles(facts, config.tp_size, config.ep_size > 1)
        for pair in facts.ties.items():
            one, other = (styles.get(name.rpartition(".")[0], ("", ""))[0] for name in pair)
            if (one == "rowwise", bool(one)) != (other == "rowwise", bool(other)):
                why = f"{pair[1]} and {pair[0]} are one weight, of which they need other parts"
                refuse(f"tp_size={config.tp_size}", why, "tp_size=1")
        reason = "sequence_parallel=false" if config.sequence_parallel is False else facts.sequence_obstacle
        if config.sequence_parallel and reason is not None:
            refuse("sequence_parallel=true", reason, "sequence_parallel=false")
        grid = (config.tp_row_size, config.tp_col_size) if config.tp_col_size > 1 else None
        if grid is not None:
            check_grid(facts, styles, config)
        fused = config.tp_overlap and config.compile != "none"
        obstacle = facts.memory_obstacle or (reason and f"sequence parallelism is off: {reason}")
        if fused and obstacle:
            refuse(f"tp_overlap=true with compile={config.compile}", obstacle, "tp_overlap=false")
        part = TensorPart(styles, reason, config.tp_overlap, anatomy.sums_over_tokens, facts, grid, fused)
        if config.compile != "none" and part.why_not_compiled is not None:
            refuse(f"compile={config.compile}", *part.why_not_compiled)
        return part

    def notes(self, part: TensorPart) -> list[str]:
        notes = []
        if part.whole_sequences not in (None, "sequence_parallel=false"):
            notes.append(f"sequence parallelism is off, so norms need more memory: {part.whole_sequences}")
        if part.overlap:
            way = "inductor's fused products over symmetric memory" if part.fused else "halves of products in turn"
            notes.append(f"tp_overlap: {way}")
        return notes

    def apply(self, model: PreTrainedModel, part: TensorPart, building: Building) -> None:
        """Split layers, embedding and head; then what lies between them lives on parts of the sequence."""
        mesh, device = building.mesh["tp"], building.mesh.device
        building.sequence_flag = flag = SequenceParallelFlag(part.whole_sequences is None)
        grid = None
        if part.grid is not None:
            of_matrices, sharing = building.mesh.grid, None
            ranks = building.mesh.size("tp") // (part.facts.heads or (1, 1))[1]  # of a key/value head
            if ranks > 1:  # consecutive ones
                groups = list_axis_ranks(building.mesh.config, "tp")
                blocks = [own[at : at + ranks] for own in groups for at in range(0, len(own), ranks)]
                sharing = building.mesh.groups.along(blocks, urgent=True)
            grid = Grid(of_matrices, sharing)
        apply_tensor_parallel(model, mesh, part.words, device, flag, part.overlap, grid)
        split_experts(model, part.words, mesh, device, flag)
        apply_vocab_parallel(model, mesh, part.words, device, part.sums_over_tokens, part.overlap)
        retie(model, part.facts.ties)
        if flag.on:
            apply_sequence_parallel(model, mesh.get_group(), flag)
            building.whole_tokens.append(functools.partial(_gather_whole_tokens, building))
        # torch cannot compute the gradients of weights later if those of several have a node of the graph in common.
        if grid is None and building.mesh.config.pipeline_schedule not in (*SPLIT_BACKWARD, AUTO_SCHEDULE):
            sum_by_layer(model, mesh.get_group())

    def finish(self, model: PreTrainedModel, part: TensorPart, building: Building) -> None:
        """Give whole logits to whoever reads them, and padding to sequences whose length tp does not divide."""
        # FSDP2's own hook reads all of an output in every step: it must run first, or it has the logits gathered.
        model.register_forward_hook(functools.partial(make_logits_whole, DTensor))
        # FSDP2 fears in-place changes of outputs that are views; what a script reads here is a new tensor.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        if building.mesh.config.sharing_size == 1:  # data ranks reduce those of scalars themselves
            hook_gradients_of_scalars(model, make_gradient_whole, building.mesh.device)
        if part.whole_sequences is None:
            assert building.sequence_flag is not None
            for reader in find_token_readers(model):
                group, caches = building.mesh.group("tp"), building.pipeline is None
                pad_sequences_of_reader(reader, group, building.sequence_flag, caches)


def _gather_whole_tokens(building: Building, tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Gather [sequences, own tokens, …] -> [sequences, tokens, …], without what only pads to a multiple of tp."""
    length = get_tokens_of(batch).shape[1]
    length = length if building.local_length is None else building.local_length(length)
    return join_sequence(tensor, building.mesh.group("tp"))[:, :length]


TENSOR = Tensor()
