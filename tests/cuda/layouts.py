"""Layouts that train on the pretended CUDA device, and how often each may make the host wait in a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Relative, of losses of five steps: fp32, bf16's 8 bits, and what int8, fp8 or int4 on the way leave.
FP32, BF16, QUANTISED = 2e-5, 2e-2, 3e-2
#: bf16 where documents that see each other make a difference of more.
PACKED = 1e-3


@dataclass(frozen=True)
class Layout:
    """One layout and the script that runs on it.

    Attributes:
        waits: of the host, in a step of the slowest rank, more than one process has. `why` says what for.
        optimizer: one of `KINDS` in steps.py.
        small: activation offload takes tensors of so many bytes, as those of tiny models are.
        padded: the batch has a padding mask with zeros.
        packed: each row is a pack of two documents.
        adapter: one of `ADAPTERS` in steps.py.
        resized: the vocabulary has seven new tokens, whose rows are drawn.
    """

    spec: str
    waits: int = 0
    why: str = ""
    model: str = "llama"
    dtype: str = "float32"
    autocast: bool = False
    scaler: bool = False
    adapter: str = ""
    optimizer: str = "sgd"
    accumulate: int = 1
    evaluate: bool = False
    small: int | None = None
    padded: bool = False
    packed: bool = False
    resized: bool = False
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if (self.waits > 0) != bool(self.why):
            raise ValueError(f"{self.spec}: say what its {self.waits} waits are for")

    @property
    def name(self) -> str:
        """`tp2_pp2-bf16`: what `-k` selects."""
        marks = [self.model] if self.model != "llama" else []
        named = ("autocast", "scaler", "evaluate", "padded", "packed", "resized")
        marks += [name for name in named if getattr(self, name)] + [self.adapter] * bool(self.adapter)
        marks += [self.optimizer] if self.optimizer not in ("sgd", "adamw") else []
        marks += ["bf16"] if self.dtype == "bfloat16" else []
        marks += [f"{self.accumulate}steps"] if self.accumulate > 1 else []
        return "-".join([self.spec.replace(":FOLDER", "").replace("=", "").replace(",", "_"), *marks])

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        total = 1
        for _axis, size in re.findall(r"\b(dp_replicate|dp_shard|pp|tp|cp)=(\d+)", self.spec):
            total *= int(size)
        return total

    @property
    def gap(self) -> float:
        """How far losses may be from those of one process, relative."""
        if self.tolerance is not None:
            return self.tolerance
        if "quantize" in self.spec or "fp8" in self.spec:
            return QUANTISED
        return BF16 if self.autocast or self.scaler or self.dtype != "float32" else FP32


_DOCUMENTS = "documents, which the host cuts; labels at masked tokens, which are refused"
_MASKED_LABELS = "labels at masked tokens, which are refused"
_FLASH = f"{_MASKED_LABELS}: auto takes torch_flash for bf16"
_ENDS = "where documents end"
_ENDS_OF_PARTS = f"{_ENDS}, per micro-batch and stage"
_UNEVEN = "of a length that tp does not divide: transformers asks the mask twice"
_HOST_GRADIENTS = "FSDP2 waits for each parameter's gradient on the host"
_CHUNKS = "an event per chunk of 64 MiB, which the optimizer on the host waits for"
_SIZES = "sizes that the router chose, per layer of experts"
_SIZES_OF_PARTS = "the same per micro-batch, with those that transformers' grouped products ask for"

DATA = [
    Layout("dp_replicate=2"),
    Layout("dp_shard=2,zero_stage=0"),
    Layout("dp_shard=2,zero_stage=1"),
    Layout("dp_shard=2,zero_stage=2"),
    Layout("dp_shard=2"),
    Layout("dp_replicate=2,dp_shard=2"),
    Layout("dp_shard=2,gradient_reduction=step", accumulate=2),
    Layout("dp_shard=2", model="gpt2"),
    Layout("dp_shard=2,tiled_mlp=true"),
    Layout("dp_shard=2", resized=True),
]
COMPRESSED = [
    Layout("dp_shard=2,quantize_weights=int8"),
    Layout("dp_shard=2,quantize_weights=fp8"),
    Layout("dp_shard=2,quantize_gradients=int4,gradient_error_feedback=true"),
    Layout("dp_shard=4,hierarchical_shard=2"),
    Layout("dp_shard=4,hierarchical_shard=2,quantize_weights=int8,quantize_gradients=int8"),
]
OPTIMIZERS = [
    Layout("dp_shard=2", optimizer="adafactor"),
    Layout("tp=2,dp_shard=2", 1, _UNEVEN, optimizer="adafactor"),
    Layout("dp_shard=2", optimizer="lists"),
    Layout("dp_shard=2", optimizer="norms"),
]
OFFLOAD = [
    Layout("dp_shard=2,offload=cpu", 23, _HOST_GRADIENTS, optimizer="adamw"),
    Layout("dp_shard=2,offload=optimizer", 1, _CHUNKS, optimizer="adamw"),
    Layout("dp_shard=2,offload=nvme:FOLDER", 1, _CHUNKS, optimizer="adamw"),
    Layout("dp_shard=2,offload=nvme_all:FOLDER", 26, _HOST_GRADIENTS, optimizer="adamw"),
    Layout("tp=2,offload=optimizer", 2, _CHUNKS, optimizer="adamw"),
    Layout("dp_shard=4,activation_checkpointing=full@2:3,offload=optimizer@1", 1, _CHUNKS, optimizer="adamw"),
    Layout("pp=2,dp_shard=2,activation_checkpointing=full@0:1,offload=optimizer@3", 1, _CHUNKS, optimizer="adamw"),
    Layout("tp=2,activation_offload=true", 1, _UNEVEN, small=64),
    Layout("dp_shard=2,activation_offload=true", small=64),
    Layout("dp_shard=2,activation_offload=true,activation_checkpointing=full", small=64),
]
TENSOR = [
    Layout("tp=2", 1, _UNEVEN),
    Layout("tp=2,sequence_parallel=false"),
    Layout("tp=4", 1, _UNEVEN),
    Layout("tp=2,tp_overlap=true", 1, _UNEVEN),
    Layout("tp=2,dp_shard=2", 1, _UNEVEN),
    Layout("tp=4,tp_mesh=2x2", 1, _UNEVEN),
    Layout("tp=2", 1, _UNEVEN, model="gpt2"),
    Layout("tp=2", 1, _UNEVEN, evaluate=True),
    Layout("tp=2,lean_loss=true", 1, _UNEVEN),
    Layout("tp=2,tiled_mlp=true", 1, _UNEVEN),
    Layout("tp=2", 1, _UNEVEN, resized=True),
]
RECOMPUTED = [
    Layout("tp=2,activation_checkpointing=full", 1, _UNEVEN),
    Layout("dp_shard=2,activation_checkpointing=selective"),
    Layout("tp=2,activation_checkpointing=selective", 1, _UNEVEN),
    Layout("tp=2,activation_checkpointing=full,partition_activations=true,sequence_parallel=false"),
]
PIPELINE = [
    *(
        Layout(f"pp=2,pipeline_schedule={schedule}")
        for schedule in (
            *("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"),
            *("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"),
        )
    ),
    Layout("pp=2", padded=True),
    Layout("pp=2", evaluate=True),
    Layout("pp=2", model="gpt2"),
    Layout("pp=2", resized=True),
    Layout("pp=2,dp_shard=2"),
    Layout("tp=2,pp=2"),
    Layout("pp=2,dp_shard=2,gradient_reduction=step", accumulate=2),
    Layout("tp=2,pp=2,dp_shard=2", autocast=True),
    Layout("pp=2,pipeline_schedule=chimera"),
    Layout("pp=2,dp_replicate=2,pipeline_schedule=chimera"),
    Layout("tp=2,pp=2,activation_offload=true", small=64),
]
CONTEXT = [
    Layout("cp=2,dp_shard=1,context_parallel=ring", 1, _DOCUMENTS),
    Layout("cp=2,dp_shard=1,context_parallel=ulysses", 1, _DOCUMENTS),
    Layout("cp=2,dp_shard=1,context_parallel=allgather", 1, _DOCUMENTS),
    Layout("cp=4,dp_shard=1,context_parallel=hybrid:2", 1, _DOCUMENTS),
    Layout("cp=2,dp_shard=1,context_parallel=ring", 1, _DOCUMENTS, autocast=True),
    Layout("cp=2,dp_shard=1,context_parallel=ring", padded=True),
    Layout("cp=2,tp=2,dp_shard=1", 1, _DOCUMENTS),
    Layout("cp=2,dp_shard=2", 1, _DOCUMENTS),
    Layout("cp=2,dp_shard=1,activation_offload=true", 1, _DOCUMENTS, small=64),
    Layout("cp=2,dp_shard=1,activation_offload=true,activation_checkpointing=full", 1, _DOCUMENTS, small=64),
]
COMPILED = [
    Layout("dp_shard=2,compile=regional"),
    Layout("tp=2,compile=regional,activation_checkpointing=selective", 1, _UNEVEN),
    Layout("pp=2,compile=regional"),
    Layout("cp=2,dp_shard=1,compile=regional", 1, _DOCUMENTS),
    Layout("dp_shard=2,ep=2,compile=regional", 1, _SIZES, model="qwen3_moe"),
]
EXPERTS = [
    Layout("dp_shard=2,ep=2", 1, _SIZES, model="qwen3_moe"),
    Layout("dp_shard=1,tp=2,ep=2", 2, _SIZES, model="qwen3_moe"),
    Layout("dp_shard=2,ep=2,expert_capacity_factor=1.5", 1, _SIZES, model="qwen3_moe", tolerance=1e-1),
    Layout("dp_shard=2,ep=2,pp=2", 16, _SIZES_OF_PARTS, model="qwen3_moe"),
    Layout("tp=2", 1, _UNEVEN, model="qwen3_moe"),
]
ADAPTERS = [
    Layout("tp=2", 1, _UNEVEN, adapter="lora"),
    Layout("dp_shard=2", adapter="lora"),
    Layout("dp_shard=2", adapter="vera"),
    Layout("dp_shard=2,dp_replicate=2", adapter="oft", accumulate=2),
    Layout("cp=2,dp_shard=1", 1, _DOCUMENTS, adapter="mica"),
    Layout("dp_shard=2,offload=cpu", 23, _HOST_GRADIENTS, optimizer="adamw", adapter="mica"),
]
PRECISION = [
    Layout("dp_shard=2", autocast=True),
    Layout("tp=2", 1, _UNEVEN, autocast=True),
    Layout("tp=2,tp_overlap=true", 1, _UNEVEN, autocast=True),
    Layout("dp_shard=2", 1, _FLASH, dtype="bfloat16"),
    Layout("tp=2", 2, f"{_FLASH}; of a length that tp does not divide it reads where documents end", dtype="bfloat16"),
    Layout("pp=2", autocast=True),
    Layout("dp_shard=2", scaler=True),
    Layout("dp_shard=2,ep=2", 1, _SIZES, model="qwen3_moe", autocast=True),
    Layout("dp_shard=2,attention=torch_flash", 1, _MASKED_LABELS, dtype="bfloat16"),
    Layout("dp_shard=2,attention=torch_flash", 1, _ENDS, dtype="bfloat16", packed=True, tolerance=PACKED),
    Layout("tp=2,attention=torch_flash", 1, _ENDS, dtype="bfloat16", packed=True, tolerance=PACKED),
    Layout("pp=2,attention=torch_flash", 8, _ENDS_OF_PARTS, dtype="bfloat16", packed=True, tolerance=PACKED),
    Layout("cp=2,dp_shard=1,context_parallel=ring", 1, _DOCUMENTS, dtype="bfloat16", packed=True, tolerance=PACKED),
    Layout("dp_shard=2,precision=fp8", 1, _FLASH, dtype="bfloat16"),
]
GROUPS = {
    **{"data": DATA, "compressed": COMPRESSED, "offload": OFFLOAD, "tensor": TENSOR, "recomputed": RECOMPUTED},
    **{"pipeline": PIPELINE, "context": CONTEXT, "experts": EXPERTS, "adapters": ADAPTERS, "precision": PRECISION},
    **{"compiled": COMPILED, "optimizers": OPTIMIZERS},
}
ALL = {layout.name: layout for group in GROUPS.values() for layout in group}
