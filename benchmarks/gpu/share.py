"""One rank's share of a large model, alone on one GPU: its collectives go to a process group that moves nothing.

Weights are random: what a step computes has no meaning, how long it takes and what it keeps has.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.apply.parallelize import choose_default_device, parallelize_model
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.model.anatomy import build_on_meta
from hf_parallel.model.calls import note_unread_logits
from hf_parallel.planner import make_cluster, shape_of
from hf_parallel.planner.candidates import Goal, to_job, to_layout
from hf_parallel.planner.detect import detect
from hf_parallel.planner.dryrun.run import on_meta, settle_layout
from hf_parallel.planner.dryrun.world import materialise_weights, pretend_world
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.pipeline import Stage, make_stages
from hf_parallel.planner.search import count_activations
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

#: Llama-3.2-1B, Llama-3.1-8B and Qwen3-30B-A3B by their numbers, and two that a CPU has done in a moment.
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
    "30B-A3B": {
        **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128},
        **{"num_experts_per_tok": 8, "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 4},
    },
    "tiny": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "tie_word_embeddings": False},
    "tiny-A": {
        **{"hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_experts": 8},
        **{"num_experts_per_tok": 2, "head_dim": 32},
    },
}
#: What tensors that come from other ranks are taken to say.
ANY_VALUE = 1
_LARGE = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 65536}
_TINY = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8000, "max_position_embeddings": 1024}


def config_of(shape: str, **changes: Any) -> Any:
    """Return the config of a Llama, or of a Qwen3 mixture where the shape has experts."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    kind = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else LlamaConfig
    common = _TINY if shape.startswith("tiny") else _LARGE
    return kind(**{**common, **SHAPES[shape], "use_cache": False, **changes})


def layout_of(spec: str) -> ParallelConfig:
    """With all its sizes; without a spec one process."""
    config = ParallelConfig.parse(spec or "dp_shard=1")
    return config.resolve(math.prod(max(1, size) for size in config.sizes.values()))


@contextlib.contextmanager
def share(config: Any, spec: str, rank: int = 0, dtype: torch.dtype = torch.bfloat16) -> Iterator[Any]:
    """The parallel model of one rank, with memory for its weights, on this process's device."""
    layout, device = layout_of(spec), choose_default_device()
    with pretend_world(rank, layout.world_size):
        model = build_on_meta(config).to(dtype).train()
        parallelize_model(model, mesh=ParallelMesh.create(layout, device))
        materialise_weights(model, device)
        fill(model)
        model._hf_parallel.batches.axes = []  # other ranks, whose batches would be compared, are not there
        yield model


def fill(model: Any) -> None:
    """Numbers that are no NaN, which some kernels take longer for."""
    with torch.no_grad():
        for parameter in model.parameters():
            get_stored(parameter).normal_(0.0, 0.02)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.1, 1.0)


class OtherStagesAnswer(TorchDispatchMode):
    """In here every tensor that is asked for its value says 1: a pipeline's stages agree on shapes at first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        return ANY_VALUE if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Call the model as Trainer does: for its loss alone."""
    with note_unread_logits():
        return model(**batch)["loss"]


def planned(config: Any, spec: str, rows: int, seq: int, rank: int = 0) -> tuple[Layout, Job, tuple[Stage, ...]]:
    """What the planner asks its formulas: the layout, the work of a step, the stages."""
    layout, _ = settle_layout(on_meta(config), layout_of(spec), rank)
    shape = count_activations(shape_of(config), config, "bf16", None)
    size = rows // (layout.pipeline_microbatches or 1)
    goal = Goal(shape, cluster_of(layout), seq, None, "bf16", "adamw", 0, rows=rows, accumulation=1)
    where, job = to_layout(layout), to_job(goal, layout, size, rows // size)
    return where, job, make_stages(shape, where, job)


def cluster_of(layout: ParallelConfig) -> Cluster:
    """As many GPUs of this machine's kind; of an H100's where the catalogue lacks it, or there is none."""
    try:
        name = detect().gpu.name if torch.accelerator.is_available() else "h100-80gb"
    except SpecError:
        name = "h100-80gb"
    return make_cluster(name, layout.world_size)


def tokens(rows: int, seq: int) -> dict[str, torch.Tensor]:
    """Return a batch of many different tokens, which go to different experts."""
    ids = (torch.arange(rows * seq, device=choose_default_device()) % _TINY["vocab_size"]).view(rows, seq)
    return {"input_ids": ids, "labels": ids}
