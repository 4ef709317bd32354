"""Keys of how layers compute: attention kernel, recomputation, compilation, loss, precision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hf_parallel.ask.keys.axes import ExpertKeys, TensorKeys
from hf_parallel.ask.keys.data import check_rank_list, read_listed_ranks
from hf_parallel.ask.keys.pipeline import SPLIT_BACKWARD, PipelineKeys
from hf_parallel.ask.keys.sizes import Keys, key
from hf_parallel.ask.spec import refuse, spell

AUTO = "auto"
#: Flash attention by torch's own kernels, as the spec spells it.
TORCH_FLASH = "torch_flash"
#: And as transformers' registries have it: they look for a package behind every name with "flash" in it.
REGISTERED_FLASH = "hf_parallel_documents"
_EVERY = re.compile(r"every:(\d+)")


@dataclass(frozen=True)
class AttentionKeys(Keys):
    """The attention kernel that layers call."""

    holds_alone = True

    attention: str = key(
        AUTO,
        "`eager`, `sdpa`, `torch_flash` (torch's own flash kernels, packs of documents too), `flash_attention_2` to "
        "`_4`, …; `auto`: `torch_flash` where it gains on a GPU, else the model's own",
    )


@dataclass(frozen=True)
class CompileKeys(ExpertKeys, PipelineKeys):
    """torch.compile of layers."""

    holds_alone = True

    compile: str = key(
        "none",
        "`regional` compiles each layer, equal ones once; experts stay outside of its graphs",
        choices=("none", "regional"),
    )

    def check_keys(self) -> None:
        """Reject layouts whose layers cannot be compiled."""
        if self.compile != "none":
            check_compiled(self, f"compile={self.compile}")


def check_compiled(keys: Any, asked: str) -> None:
    """Reject what compiled layers cannot do.

    One graph of a layer cannot take its backward pass apart, nor be called in pieces.

    Args:
        asked: the setting that asks for compiled layers, as an error names it.
    """
    if getattr(keys, "tiled_mlp", False):  # `CompileKeys` alone lack it
        refuse(asked, "tiled_mlp=true runs MLPs in pieces, which one graph of a layer does not", "tiled_mlp=false")
    if keys.tp_size > 1:
        if keys.tp_overlap and (keys.compile == "none" or keys.sequence_parallel is False):
            why = "needs compile=regional and parts of the sequence, whose sums it fuses with products"
            refuse(asked, f"tp_overlap=true {why}", "tp_overlap=false")
        if keys.tp_mesh is not None:
            refuse(
                asked, f"tp_mesh={keys.tp_mesh} is not part of compiled layers", f"tp={keys.tp_size} without tp_mesh"
            )
        if keys.precision != "auto":
            refuse(asked, f"precision={keys.precision} sends 8 bits between the ranks of tp", "precision=auto")
    if keys.pp_size > 1 and keys.pipeline_schedule in SPLIT_BACKWARD:
        why = "computes gradients of inputs and of weights at different times, a compiled layer both at once"
        refuse(asked, f"pipeline_schedule={keys.pipeline_schedule} {why}", "pipeline_schedule=1f1b")


@dataclass(frozen=True)
class RecomputeKeys(CompileKeys, TensorKeys):
    """Activation checkpointing, and where kept activations rest."""

    holds_alone = True

    activation_checkpointing: str = key(
        "none",
        "`full` recomputes each layer in the backward pass, `every:N` every N-th, `selective` all but products, "
        "attention and what ranks send; `full@2:3`, `full@8-15` on these ranks alone",
    )
    activation_offload: bool = key(False, "what layers keep for the backward pass rests on the host")
    partition_activations: bool = key(
        False, "of a checkpointed layer's input each `tp` rank keeps a part, also without sequence parallelism"
    )

    @property
    def recompute_way(self) -> str:
        """The way in which ranks that recompute do so."""
        return self.activation_checkpointing.partition("@")[0]

    @property
    def recompute_ranks(self) -> frozenset[int] | None:
        """The ranks that recompute; None: all."""
        return read_listed_ranks(self.activation_checkpointing)

    def recompute_way_on(self, rank: int) -> str:
        """Return what a rank recomputes."""
        return self.recompute_way if self.recompute_ranks is None or rank in self.recompute_ranks else "none"

    def check_keys(self) -> None:
        """Reject a way that is not known, and settings that keep activations in two ways at once."""
        way, what = self.recompute_way, f"activation_checkpointing={self.activation_checkpointing}"
        if way not in ("none", "selective", "full") and not read_recompute_interval(way):
            refuse(what, "not one of none, selective, full, every:N", "activation_checkpointing=every:2")
        check_rank_list(what, way, self.activation_checkpointing)
        if self.activation_offload and self.compile != "none":
            refuse("activation_offload=true", f"compile={self.compile} keeps what it likes", "compile=none")
        if self.partition_activations:
            what, without = "partition_activations=true", "partition_activations=false"
            if self.sequence_parallel:
                refuse(what, "sequence_parallel=true has cut them already", without)
            for name, value in (("activation_offload", False), ("compile", "none")):
                if getattr(self, name) != value:
                    refuse(what, f"{name}={spell(getattr(self, name))} keeps them another way", without)
            keeps_all = self.recompute_way == "none"
            if self.tp_size == 1:
                works = "tp_size=2" + ",activation_checkpointing=full" * keeps_all
                refuse(what, "tp_size=1 has no rank to keep a part", works)
            if keeps_all:
                refuse(what, "activation_checkpointing=none keeps more than inputs", "activation_checkpointing=full")


def read_recompute_interval(way: str) -> int:
    """Return N of `every:N`, else 0."""
    found = _EVERY.fullmatch(way)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class LossKeys(Keys):
    """Head and loss in chunks of tokens."""

    holds_alone = True

    lean_loss: str = key(
        "auto",
        "head and loss in chunks of tokens: `auto` where a Trainer or a pipeline takes the model's own loss alone and "
        "chunks need less memory (over data ranks for any number of tokens), `true` in loops too, where logits are "
        "made when read, before the optimizer's step",
        choices=("auto", "true", "false"),
    )


@dataclass(frozen=True)
class PrecisionKeys(TensorKeys):
    """Products in 8 bits."""

    holds_alone = True

    precision: str = key(
        "auto",
        "`fp8` or `int8`: the layers' linears multiply in 8 bits, by torchao; `auto`: as Trainer's `bf16`, `fp16` say",
        choices=("auto", "fp8", "int8"),
    )
    precision_scaling: str = key(
        "auto",
        "a scale per operand (`tensorwise`, fp8's default) or per row (`rowwise`, int8's); `rowwise_with_gw_hp`: "
        "weights' gradients in full",
        choices=("auto", "tensorwise", "rowwise", "rowwise_with_gw_hp"),
    )

    def check_keys(self) -> None:
        """Reject keys that contradict each other."""
        scaling, asked = f"precision_scaling={self.precision_scaling}", f"precision={self.precision}"
        if self.precision == "auto" and self.precision_scaling != "auto":
            refuse(scaling, "precision=auto scales nothing", "precision=fp8")
        if self.precision == "int8" and self.precision_scaling == "tensorwise":
            refuse(scaling, "precision=int8 scales by row", "precision_scaling=rowwise")
        if self.precision != "auto" and self.tp_overlap:
            refuse(asked, "tp_overlap=true cuts products whose scale is one", "tp_overlap=false")


@dataclass(frozen=True)
class TiledKeys(RecomputeKeys):
    """MLPs in pieces of the sequence."""

    holds_alone = True

    tiled_mlp: bool = key(
        False,
        "MLPs over pieces of the sequence, each computed again in the backward pass: for sequences of 100,000 tokens",
    )

    def check_keys(self) -> None:
        """Reject what cuts or keeps the same products in another way."""
        if not self.tiled_mlp:
            return
        if self.recompute_way == "selective":
            why = f"activation_checkpointing={self.activation_checkpointing} keeps products that pieces compute again"
            refuse("tiled_mlp=true", why, "activation_checkpointing=full")
        if self.pp_size > 1 and self.pipeline_schedule in SPLIT_BACKWARD:
            why = f"pipeline_schedule={self.pipeline_schedule} takes a backward apart, a piece computes both halves"
            refuse("tiled_mlp=true", why, "pipeline_schedule=1f1b")
        for name, value, why in (
            ("precision", "auto", "has a scale for all tokens of a product"),
            ("tp_overlap", False, "cuts the same products in halves"),
        ):
            found = getattr(self, name, value)  # precision is a key of another class
            if found != value:
                refuse("tiled_mlp=true", f"{name}={spell(found)} {why}", f"{name}={spell(value)}")
