"""Predictions of layout, memory and speed without a process group, a GPU or weights.

Names are imported when they are asked for: the catalogue of GPUs is read before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.lazy import export_lazily
from hf_parallel.planner.hardware import Cluster, Gpu, Link, find_gpu, find_link, make_cluster

if TYPE_CHECKING:
    from hf_parallel.planner.layout import Job, Layout
    from hf_parallel.planner.predict import predict, predict_step
    from hf_parallel.planner.prediction import Prediction
    from hf_parallel.planner.shape import ModelShape, shape_of

__all__ = [
    "Cluster",
    "Gpu",
    "Job",
    "Layout",
    "Link",
    "ModelShape",
    "Prediction",
    "find_gpu",
    "find_link",
    "make_cluster",
    "predict",
    "predict_step",
    "shape_of",
]

_HOME = {
    "Job": "layout",
    "Layout": "layout",
    "predict": "predict",
    "predict_step": "predict",
    "Prediction": "prediction",
    "ModelShape": "shape",
    "shape_of": "shape",
}

export_lazily(__name__, {name: f"{__name__}.{module}" for name, module in _HOME.items()})
