"""All axes, in the order in which they are applied to a model: from inside a layer outwards, storage last."""

from __future__ import annotations

from hf_parallel.axes.attention_kernel import ATTENTION
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.compile import COMPILE
from hf_parallel.axes.context.axis import CONTEXT
from hf_parallel.axes.data.axis import DATA
from hf_parallel.axes.experts.axis import EXPERTS
from hf_parallel.axes.loss import LOSS
from hf_parallel.axes.pipeline.axis import PIPELINE
from hf_parallel.axes.precision import PRECISION
from hf_parallel.axes.recompute import RECOMPUTE
from hf_parallel.axes.storage import COMPRESSION, OFFLOAD
from hf_parallel.axes.tensor.axis import TENSOR
from hf_parallel.axes.tiled_mlp import TILED_MLP

AXES: tuple[Axis, ...] = (
    ATTENTION,
    RECOMPUTE,
    TILED_MLP,
    COMPILE,
    LOSS,
    PRECISION,
    TENSOR,
    CONTEXT,
    EXPERTS,
    PIPELINE,
    DATA,
    COMPRESSION,
    OFFLOAD,
)
