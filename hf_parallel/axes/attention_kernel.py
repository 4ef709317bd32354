"""The attention kernel that layers call."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.ask.keys.layers import AUTO, REGISTERED_FLASH, TORCH_FLASH
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.context.choose import can_use_registries, read_score_dropout, read_sliding_window
from hf_parallel.axes.context.flash import compute_widest_head
from hf_parallel.axes.torch_flash import measure_gap
from hf_parallel.model.anatomy import get_text_config, read_head_width_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


# ---- The kernel of a model: the one that the spec names, if it can run, or the one that suits -----------------------
# attention=       runs on             windows   caps   sinks   packs, padding
# eager            anything            yes       yes    yes     by a matrix of scores
# sdpa             anything            yes       no     no      by a matrix of who sees whom
# torch_flash      anything            yes       no     yes     document by document
# flash_attention_2, _3, _4            as the package can; transformers says what it lacks


@dataclass(frozen=True)
class Kernel:
    """The kernel that layers will call.

    Attributes:
        why: the reason of a choice, for people.
        own: is it the model's already?
        shifts: does the model's loss shift labels by one?
    """

    name: str
    why: str | None = None
    own: bool = False
    shifts: bool = False


@dataclass(frozen=True)
class _Package:
    """Where a kernel comes from, the GPU that it needs, and what it cannot do and transformers would leave out."""

    name: str
    module: str
    capability: tuple[int, int]
    drops: bool = False


_PACKAGES = {
    "flash_attention_2": _Package("flash-attn", "flash_attn", (8, 0), drops=True),
    "flash_attention_3": _Package("flash-attn-3", "flash_attn_interface", (9, 0)),
    "flash_attention_4": _Package("flash-attn-4", "flash_attn", (9, 0)),
}


def _find_missing_feature(name: str, facts: AttentionFacts) -> str | None:
    package = _PACKAGES.get(name)
    if package is not None:
        if facts.lacks is not None and find_spec(package.module) is None:
            return f"the package {package.name} is not installed"
        if facts.device == "cpu" or (facts.device == "cuda" and facts.capability < package.capability):
            here = facts.device if facts.device == "cpu" else "one of {}.{}".format(*facts.capability)
            return "needs a GPU of compute capability {}.{}, here is {}".format(*package.capability, here)
        if facts.dropout is not None and not package.drops:
            return f"{facts.dropout} would be left out"
    return facts.lacks


def find_what_torch_flash_lacks(facts: AttentionFacts) -> str | None:
    """Return why torch's flash kernels do not compute this model's attention; None if they do."""
    if not facts.interface:
        return "this model has an attention of its own"
    if facts.softcap is not None:
        return f"attn_logit_softcapping={facts.softcap:g}, and torch's flash kernels have no soft cap"
    if facts.dropout is not None:
        return f"{facts.dropout}, and torch's flash kernels of several documents drop no scores"
    return None


def choose_kernel_for_auto(config: ParallelConfig, facts: AttentionFacts | None) -> Kernel | None:
    """Choose a kernel for `auto`; None where there is nothing to choose."""
    if facts is None or not facts.head_size or config.cp_size > 1:  # cp has kernels of its own
        return None
    why = find_reason_against_torch_flash(facts)
    if why is not None:
        return Kernel(facts.own, why, own=True)
    window = "" if facts.window is None else f", and windows of {facts.window} tokens without a mask"
    return Kernel(TORCH_FLASH, f"packs and padded rows document by document{window}")


def find_reason_against_torch_flash(facts: AttentionFacts) -> str | None:
    """Return why `auto` leaves the model's own kernel; None if it does not.

    The first reason a reader would look for wins.
    """
    if facts.own not in ("sdpa", "eager"):
        return "the script's own choice"
    lacks = find_what_torch_flash_lacks(facts)
    if lacks is not None:
        return lacks
    if facts.own == "eager" and not facts.sinks:
        return "the script's own choice"
    if facts.device != "cuda":
        why = "the model's own, where there is no CUDA device; "
        return f"{why}attention=torch_flash would keep packed examples apart without a mask"
    if facts.spans:
        return "the model's own, because its loss predicts spans and so reads outputs at padding"
    if not facts.text:
        return "the model's own, because it reads more than tokens and may let some attend to later ones"
    if facts.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(facts.dtype).removeprefix("torch.")
        return f"weights are in {dtype}; under autocast to 16 bits attention=torch_flash works"
    if facts.capability < (8, 0):
        return "compute capability {}.{} has no flash kernel".format(*facts.capability)
    if not facts.head_size or facts.head_size % 8 or facts.head_size > compute_widest_head(facts.capability):
        return f"heads of {facts.head_size} numbers do not fit into torch's flash kernel"
    if not facts.here:
        return None
    found = measure_gap("cuda", facts.dtype, facts.head_size)  # it runs here once before a training does
    return None if isinstance(found, float) and found < 0.05 else f"torch's flash kernel fails a trial here ({found})"


# ---- What a model tells of its attentions, and what this machine has for them ---------------------------------------


@dataclass(frozen=True)
class AttentionFacts:
    """The facts that decide which kernel a model can run.

    Attributes:
        own: its present kernel: what its script asked for, or what transformers chose.
        interface: does it call its attention, and make its masks, through transformers' registries?
        text: is it a decoder that reads nothing but tokens?
        spans: does its loss predict one of all tokens of a row, padding too?
        head_size: of a query.
        softcap: of its scores, or None.
        dropout: `key=value` of the dropout of its scores, or None.
        window: of its sliding layers, or None.
        sinks: has it further scores per head, as gpt-oss?
        lacks: why transformers does not set the kernel that the spec names, or None.
        device: where it will run.
        capability: of a CUDA device, as (9, 0).
        dtype: of the weights.
        here: is that device this machine's, so that a kernel can be tried?
    """

    own: str
    interface: bool
    text: bool
    spans: bool
    head_size: int
    softcap: float | None
    dropout: str | None
    window: int | None
    sinks: bool
    lacks: str | None
    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    here: bool = True


def read_attention(model: PreTrainedModel, config: ParallelConfig) -> AttentionFacts | None:
    """Read the facts of a model, which is not changed; None of a module that is not one of transformers."""
    if not hasattr(model, "set_attn_implementation"):
        return None
    own = get_text_config(model)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = "cpu" if found is None else found.type
    wide, heads = getattr(own, "hidden_size", 0), getattr(own, "num_attention_heads", None)
    width = getattr(own, "qk_head_dim", None) or read_head_width_of(own)  # the first of latent attention
    lacks = None
    if config.attention not in (AUTO, TORCH_FLASH):
        # The first line of what transformers says of the kernel, tried on a model without layers.
        kind: Any = type(model)
        shell = kind.__new__(kind)
        torch.nn.Module.__init__(shell)
        shell.config = copy.deepcopy(model.config)
        try:
            shell.set_attn_implementation(config.attention)
        except (ImportError, ValueError) as error:
            lacks = str(error).strip().splitlines()[0]
    return AttentionFacts(
        own=model.config._attn_implementation or "eager",
        interface=can_use_registries(model),
        text=own is model.config and not getattr(own, "is_encoder_decoder", False),
        spans="start_positions" in inspect.signature(model.forward).parameters,
        head_size=int(width or (wide // heads if isinstance(heads, int) and heads else 0)),
        softcap=getattr(own, "attn_logit_softcapping", None) or None,
        dropout=read_score_dropout(own),
        window=read_sliding_window(own),
        sinks=any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()),
        lacks=lacks,
        device=device,
        capability=torch.cuda.get_device_capability() if device == "cuda" else (0, 0),
        dtype=getattr(model, "dtype", torch.float32),
    )


class Attention(Axis["AttentionFacts", "Kernel | None"]):
    """The kernel that the spec names, or the one that device, dtype and model suggest."""

    name = "attention"
    always_on = True  # `auto` looks at every model

    def read(self, model: nn.Module, config: ParallelConfig) -> AttentionFacts | None:
        """Read how a model's attentions are built; None if it is not one of transformers."""
        return read_attention(model, config)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: AttentionFacts | None) -> Kernel | None:
        """Return the kernel and why.

        Raises:
            SpecError: what the named kernel lacks: a package, a GPU, or a kind of attention.
        """
        name, asked = config.attention, f"attention={config.attention}"
        if name == AUTO:
            kernel = choose_kernel_for_auto(config, facts)
            return None if kernel is None else replace(kernel, shifts=anatomy.sums_over_tokens)
        if facts is None:
            refuse(asked, f"{anatomy.name} is not a transformers model", f"attention={AUTO}")
        reason = find_what_torch_flash_lacks(facts) if name == TORCH_FLASH else _find_missing_feature(name, facts)
        if reason is not None:
            plain = facts.softcap is None and not facts.sinks
            other = AUTO if config.cp_size > 1 else "sdpa" if plain and name != "sdpa" else "eager"
            refuse(asked, reason, f"attention={other}")
        return Kernel(name, shifts=anatomy.sums_over_tokens)

    def notes(self, part: Kernel | None) -> list[str]:
        return [] if part is None or part.why is None else [f"attention={part.name}: {part.why}"]

    def apply(self, model: PreTrainedModel, part: Kernel | None, building: Building) -> None:
        """Set the kernel, if it is not the model's own."""
        if part is None or part.own or building.mesh.size("cp") > 1:  # cp has a function of its own, and the name
            return
        from hf_parallel.model.known_masks import refuse_masked_targets

        own = model.config._attn_implementation or "eager"
        refuse_masked_targets(model, own, part.name, f"attention={part.name}", f"attention={own}", part.shifts)
        if part.name == TORCH_FLASH:
            from hf_parallel.axes.torch_flash import register_torch_flash

            register_torch_flash()
        model.set_attn_implementation(REGISTERED_FLASH if part.name == TORCH_FLASH else part.name)


ATTENTION = Attention()
