"""The questions to the planner: sizes of the axes, batch, how a step is computed, and the habits of an engine."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.keys.pipeline import DELAYED_SCHEDULES, MIRRORED_SCHEDULES
from hf_parallel.ask.spec import refuse

if TYPE_CHECKING:
    import torch

#: What has one scale in products in fp8: a whole operand; each row, whose product with gradients may stay in 16 bits.
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: Bytes per element of what matrix products read and write. "bf16", "fp16", "fp8" are mixed precision as Megatron-LM,
#: DeepSpeed and FSDP's policy have it; to this package's engine, and as a Transformers checkpoint is loaded, "bf16" is
#: everything in bf16. "mixed": fp32 weights under torch.autocast to bf16, which is what bf16=True of Trainer does.
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "mixed": 2}


@dataclass(frozen=True)
class Habits:
    """The differences between engines, as numbers and switches; the formulas are alike for all.

    The defaults are those of Megatron-LM, DeepSpeed and FSDP in published runs. Those without a source are fitted once
    over all published rows: see docs/reference/planner_formulas.md.
    """

    # states
    master_weights: bool = True  # 16-bit training keeps fp32 weights and moments beside the 16-bit weights
    gradients: str = "both"  # a key of `GRADIENT_BYTES`
    #: Weights are sharded at every ZeRO stage above 0, gathered for a step or a schedule; gradients are allocated by
    #: each backward, not for the whole run.
    fsdp2: bool = False
    gathered_layers: float = 2.0  # alive at a time under ZeRO-3
    balanced: bool = False  # stages are cut by cost also where an even cut is possible
    ends_as_layers: tuple[int, int] = (0, 0)  # what counts as a layer of an even cut, before and after the layers
    # activations
    fused: bool = True  # norms and gated activations keep their inputs alone, not as Transformers writes them
    logit_bytes: float = 8.0  # per logit at the fullest moment: 16-bit, fp32, and what of the gradient is alive
    keeps_products: bool = False  # selective checkpointing keeps outputs of all products, not of every second one
    kept_logit_bytes: float = 0.0  # of these, from the forward to the backward
    loss_chunk: int = 0  # tokens whose split logits are in fp32 at a time, beside the logits and their gradient
    whole_logits: bool = False  # each tp rank gathers the logits of the whole vocabulary
    #: Values are a view of the one product of queries, keys and values, which stays beside the rotated queries and
    #: keys; of several sequences attention's output is put in order, and both are kept.
    packed_attention: bool = False
    keeps_gathered: bool = False  # sequence parallelism keeps what it gathered for the gradients of weights
    # seconds
    #: Python launches each kernel, norms, rotary embeddings and activations are several; attention is torch's own.
    eager: bool = False
    #: Transformer Engine: cuDNN's attention, fused norms and activations; sequence parallelism communicates behind the
    #: products, which add gradients of weights to their fp32 sum by themselves.
    transformer_engine: bool = False
    # beside the tensors
    communicator_gib: float = 1.1  # per axis
    bucket_gib: float = 2.8  # in which ZeRO-1 and 2 reduce and gather: DeepSpeed's, three of 5e8 numbers in 16 bits
    # communication
    recomputed_outputs: int = 2  # of a checkpointed layer's two reductions, how many are repeated
    lowers_inputs: bool = False  # under autocast they travel as products read them
    regathers: bool = False  # sequence parallelism gathers the inputs again for the weights' gradients
    gathers_codes: bool = False  # sequence parallelism gathers what products in fp8 with one scale read, in 8 bits
    fp32_sums: bool = False  # gradients of 16 bits are summed over ranks and micro-batches in fp32
    fp32_keys: bool = False  # the gradients of keys and values that cp ranks send each other are in fp32
    reduces_in_step: bool = False  # gradients are all-reduced in fp32 after the last backward, behind nothing
    counts_ends: bool = False  # embedding, loss and norms are counted, too; the efficiencies were fitted without


#: "megatron": selective recomputation of norms and activations, as Megatron-LM's --recompute-modules.
#: "transformer_engine": Megatron-LM on Transformer Engine, as NeMo and Megatron-Bridge train dense models.
#: "scaling": Aleph Alpha's framework of that name (core/nn, transformer/model). Of logits there are at once: of this
#: and of the previous micro-batch in 16 bits, their logarithms of probabilities and two gradients in fp32. Buckets of
#: gradients are there in the optimizer's step alone, when there are no activations. Embedding, last norm and head are
#: layers of a pipeline's even cut (`pipe_partition_uniform`).
#: "composer": llm-foundry under FSDP; flash attention's loss has logits and gradients in 16 bits.
#: "nanotron": cuts a pipeline by the products of layers and head (`get_block_compute_costs`); 16-bit gradients are
#: added to fp32 ones and freed (`FP32GradientAccumulator`), which are reduced where they lie.
#: "torchtitan": FSDP2, and torchao's layers, which gather the parts of a sequence in 8 bits (float8_tensor_parallel);
#: a pipeline's first and last stages have a layer less (`generate_llm_fqn_per_model_part`). Per logit 16 bits, fp32
#: and a logarithm of a probability in fp32.
#: "transformers": models of Transformers as they are, under Trainer, Accelerate or TRL.
#: "hf_parallel": this package's engine, compared with dry runs in tests/planner/test_analytic.py.
HABITS = {
    "standard": Habits(),
    "megatron": Habits(keeps_products=True),
    "transformer_engine": Habits(keeps_products=True, gradients="fp32", transformer_engine=True),
    "scaling": Habits(
        gradients="bf16",
        ends_as_layers=(1, 2),
        logit_bytes=16.0,
        kept_logit_bytes=4.0,
        whole_logits=True,
        packed_attention=True,
        keeps_gathered=True,
        bucket_gib=0.0,
        reduces_in_step=True,
    ),
    "composer": Habits(logit_bytes=4.0),
    "nanotron": Habits(balanced=True, gradients="fp32", bucket_gib=0.0),
    "torchtitan": Habits(fsdp2=True, gathers_codes=True, ends_as_layers=(1, 1), logit_bytes=10.0),
    "transformers": Habits(eager=True),
    "hf_parallel": Habits(
        master_weights=False,
        fp32_sums=True,
        fp32_keys=True,
        fsdp2=True,
        gathered_layers=1.0,
        balanced=True,
        fused=False,
        eager=True,
        keeps_products=True,
        logit_bytes=12.0,
        kept_logit_bytes=4.0,
        loss_chunk=1024,
        lowers_inputs=True,
        communicator_gib=0.5,
        bucket_gib=0.0,
        recomputed_outputs=1,
        regathers=True,
        counts_ends=True,
    ),
}


#: Bytes per gradient before ZeRO-3, by how 16-bit training with master weights sums them: in 16 bits; in fp32 in place
#: of the 16-bit gradient (Megatron-LM, whose documentation has 6 + 12/N bytes per parameter); in fp32 beside it
#: (DeepSpeed's bf16 optimizer, DDP with buckets of 16 bits).
GRADIENT_BYTES = {"bf16": 2, "fp32": 4, "both": 6}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; they multiply to the number of GPUs. `dp` counts replicas x shards, `ep` is part of them.

    Ranks are numbered with tp innermost, then cp, dp, pp: (dp_replicate, pp, dp_shard, cp, tp) as in mesh.py, whose
    replicas sit on the slowest links.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int = 0
    virtual_stages: int = 1
    sequence_parallel: bool = False
    tp_overlap: bool = False  # a part of tp's collectives runs behind their products
    dp_replicate: int = 1
    schedule: str = "1f1b"
    context: str = "ring"  # how cp shares attention: "ring", "ulysses", "allgather" or "hybrid:U"
    split: tuple[int, ...] | None = None  # layers per stage; default: even, or by cost where that is impossible
    reduces_each: bool = False  # gradients in every micro-batch of a step, not once after them
    reduces_each_run: bool = True  # of a pipeline's schedule, of which a step may have several
    hierarchical_shard: int = 1  # ranks of a group within which ZeRO-3's backward gathers; 1: all shards
    quantize_weights: str = "none"
    quantize_gradients: str = "none"
    gradient_error_feedback: bool = False
    partition_activations: bool = False  # inputs of checkpointed layers over tp, without sequence parallelism
    fills_bubbles: bool = False  # with the curvature of linear layers
    tp_columns: int = 1  # of the grid of tp's ranks, innermost, over which weights are cut along their other dim

    @property
    def tp_rows(self) -> int:
        """Rows of the grid of tp's ranks; all of them where there is none."""
        return self.tp // self.tp_columns

    @property
    def tp_and_columns(self) -> tuple[int, int]:
        """The numbers that decide how much of a matrix is a rank's."""
        return self.tp, self.tp_columns

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO spreads its states: the data ranks of one replica, and cp with them."""
        return self.dp // self.dp_replicate * self.cp

    @property
    def has_several_data_ranks(self) -> bool:
        """Do ranks see different tokens, so that FSDP2 has something to gather?"""
        return self.dp * self.cp > 1 and self.schedule not in (*DELAYED_SCHEDULES, *MIRRORED_SCHEDULES)

    @property
    def stream_parts(self) -> int:
        """Over how many tp ranks the residual stream is cut."""
        return self.tp if self.sequence_parallel else 1

    @property
    def heads_over(self) -> int:
        """Over how many of the cp ranks the heads are in attention; rings have the others."""
        kind, _, inner = self.context.partition(":")
        return int(inner) if kind == "hybrid" else self.cp if kind == "ulysses" else 1

    @property
    def expert_split(self) -> int:
        """Over how many ranks experts are split: whole ones over ep, else each of them inside over tp."""
        return self.ep if self.ep > 1 else self.tp


@dataclass(frozen=True)
class Job:
    """The batch and how a step is computed; `engine` is a key of `HABITS`."""

    seq: int
    micro_batch: int
    micro_batches: int
    recompute: str = "none"
    precision: str = "bf16"
    lora: int = 0  # rank of the adapters, 0: all weights are trained
    four_bit: str = "none"  # a key of `states.PACKED_BYTES`: how the frozen linears of the layers are packed
    optimizer: str = "adamw"
    offload: str = "none"
    attention: str = "flash"  # a kind of `attention.py`
    eight_bit: str = "auto"  # precision in which the blocks' linears multiply: fp8, int8; auto: as all else
    eight_bit_scaling: str = "tensorwise"  # one of `SCALINGS`
    engine: str = "standard"
    calls: int = 1  # of a pipeline's schedule per step, each with its share of the micro-batches
    lean_loss: bool = False  # head and loss a chunk of tokens at a time, where that pays
    lowered: bool = (
        False  # fp32 weights that data ranks gather in 16 bits, adapters with them: see `make_computed_job`
    )
    activation_offload: bool = False  # what layers keep for the backward rests on the host
    tiled_mlp: bool = False  # MLPs over pieces of the sequence, each computed again in its backward
    compiled: bool = False  # torch.compile fuses what lies between the products
    fused_norms: bool = True  # a fused implementation's norms are one kernel each, not torch's own operations
    gradients: str = "auto"  # a key of `GRADIENT_BYTES`: how 16-bit training with master weights sums gradients

    @property
    def recomputed_share(self) -> float:
        """The share of the blocks that are checkpointed."""
        every = self.recompute.removeprefix("every:")
        return 1 / int(every) if every.isdigit() else float(self.recompute != "none")

    @property
    def each_recomputed(self) -> str:
        """The way in which a checkpointed block is checkpointed."""
        return "full" if self.recompute.startswith("every:") else self.recompute

    @property
    def habits(self) -> Habits:
        """The habits of the engine."""
        return HABITS[self.engine]

    def tokens(self, layout: Layout) -> float:
        """Return the tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq / layout.cp

    @property
    def micro_batches_per_call(self) -> int:
        """The micro-batches of one run of a pipeline's schedule."""
        return self.micro_batches // self.calls

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient of 16-bit training with master weights; fp16 is summed in fp16, behind its loss scale."""
        if self.precision == "fp16":
            return GRADIENT_BYTES["bf16"]
        return GRADIENT_BYTES[self.habits.gradients if self.gradients == "auto" else self.gradients]

    @property
    def width(self) -> int:
        """Bytes of what a matrix product reads and writes."""
        return WIDTHS[self.precision]

    @property
    def autocast(self) -> bool:
        """Return whether weights are stored in fp32 and lowered for each product by torch.autocast."""
        return self.precision == "mixed" or (self.precision == "fp16" and not self.habits.master_weights)

    @property
    def stored(self) -> int:
        """Bytes of a weight or gradient as it travels, and of the residual stream: those of the embedding's dtype."""
        return 4 if self.autocast else self.width

    @property
    def products(self) -> str:
        """The precision of matrix products in the blocks."""
        plain = "bf16" if self.precision == "mixed" else self.precision
        return plain if self.eight_bit == "auto" else self.eight_bit

    @property
    def gathers_codes(self) -> bool:
        """Return whether tokens are gathered over tp in the 8 bits that products read."""
        return self.habits.gathers_codes and self.products == "fp8" and self.eight_bit_scaling == "tensorwise"

    @property
    def products_beside(self) -> str:
        """The precision of attention and head, which fp8 leaves in 16 bits."""
        return "bf16" if self.precision in ("mixed", "fp8") else self.precision


def make_computed_job(layout: Layout, job: Job) -> Job:
    """Return the job as its layers see it: fp32 weights that FSDP2 gathers in 16 bits are 16-bit weights to them."""
    gathered = job.habits.fsdp2 and layout.has_several_data_ranks
    return dataclasses.replace(job, precision="bf16", lowered=True) if job.autocast and gathered else job


def make_layout(given: Mapping | Layout | None, gpus: int | None) -> Layout:
    """Fill in what is missing or None; `dp` takes the GPUs that are left.

    Raises:
        SpecError: an unknown key, or sizes that do not multiply to `gpus`.
    """
    if isinstance(given, Layout):
        layout = given
    else:
        values = {key: value for key, value in (given or {}).items() if value is not None}
        names = {field.name for field in dataclasses.fields(Layout)}
        for key in (key for key in values if key not in names):
            close = difflib.get_close_matches(key, sorted(names), n=1)
            refuse("layout", f"{key} is no key", do=f"{f'did you mean {close[0]}?' if close else sorted(names)}")
        others = math.prod(values.get(axis, 1) for axis in ("tp", "pp", "cp"))
        if "dp" not in values and gpus is not None:
            values["dp"] = max(1, gpus // others)
        values.setdefault("schedule", "interleaved_1f1b" if values.get("virtual_stages", 1) > 1 else "1f1b")
        layout = Layout(**values)
    if gpus is not None and gpus < 1:
        refuse(f"gpus={gpus}", "there must be one at least", "gpus=8")
    if gpus is not None and layout.gpus != gpus:
        fits = gpus // (layout.tp * layout.pp * layout.cp)
        product = f"tp={layout.tp} x pp={layout.pp} x cp={layout.cp} x dp={layout.dp} = {layout.gpus}"
        works = f"dp={fits}" if fits * layout.gpus // layout.dp == gpus else None
        refuse("layout", f"{product}, but there are {gpus} GPUs", works)
    if layout.zero_stage not in (0, 1, 2, 3):
        refuse("layout", f"zero_stage={layout.zero_stage}: not one of 0, 1, 2, 3")
    if layout.tp % layout.tp_columns:
        refuse("layout", f"tp_columns={layout.tp_columns} does not divide tp={layout.tp}")
    if layout.dp % layout.dp_replicate:
        refuse("layout", f"dp_replicate={layout.dp_replicate} does not divide dp={layout.dp}")
    return layout


def make_job(layout: Layout, seq: int, micro_batch: int | None, global_batch: int | None, **how: Any) -> Job:
    """Count the micro-batches of a step: global_batch / (dp x micro_batch), rounded up.

    Raises:
        SpecError: an unknown recomputation, precision or engine.
    """
    micro_batch = micro_batch or (max(1, global_batch // layout.dp) if global_batch else 1)
    count = max(1, math.ceil((global_batch or micro_batch * layout.dp) / (micro_batch * layout.dp)))
    how["precision"] = normalise_precision(how.get("precision"))
    text = (how.get("recompute") or "none").lower()  # none, selective, full or every:N
    ways = [text] if re.fullmatch(r"every:[1-9]\d*", text) else ["none", "selective", "full"]
    way = next((way for way in ways if text.startswith(way)), None)
    if way is None:
        refuse(f"recompute={how['recompute']}", "not one of none, selective, full, every:N")
    how["recompute"] = way
    if how.get("gradients", "auto") not in ("auto", *GRADIENT_BYTES):
        refuse(f"gradients={how['gradients']}", f"not one of auto, {', '.join(GRADIENT_BYTES)}", "gradients=auto")
    if how.get("engine", "standard") not in HABITS:
        refuse(f"engine={how['engine']}", f"not one of {', '.join(HABITS)}")
    if how.get("eight_bit_scaling", "tensorwise") not in SCALINGS:
        refuse(f"eight_bit_scaling={how['eight_bit_scaling']}", f"not one of {', '.join(SCALINGS)}", SCALINGS[0])
    return Job(seq, micro_batch, count, **how)


def normalise_precision(name: str | None) -> str:
    """Return a precision by any of its usual names: amp_bf16, BF16, fp8_tensorwise; mixed, bf16-mixed."""
    text = (name or "bf16").lower()
    if text.removeprefix("bf16-") == "mixed":
        return "mixed"
    named = {text.find(spelled): name for name in WIDTHS for spelled in (name, name.replace("p", "loat"))}
    named.pop(-1, None)
    if named:
        return named[min(named)]  # the first one: "fp16/bf16" keeps gradients as fp16 does
    refuse(f"precision={name}", f"not one of {', '.join(WIDTHS)}")


def name_precision_of(dtype: torch.dtype | str | None, lowered: str) -> str:
    """Return the planner's name: weights in 16 bits leave autocast nothing to lower."""
    if "16" in str(dtype):
        return "bf16"
    return {"bf16": "mixed", "fp16": "fp16"}.get(lowered, "fp32")


def name_optimizer_of(name: str) -> str:
    """Return the planner's name of one of Trainer's."""
    name = name.lower()
    return "sgd" if "sgd" in name else "adamw_8bit" if "8bit" in name else "adamw"
