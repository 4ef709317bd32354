"""Which layout, will it fit, how fast: a prediction without a process group, a GPU or weights.

Names are imported when they are asked for: the catalogue of GPUs is read before torch is imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING

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


class _Package(types.ModuleType):
    """Importing the module `predict` must not hide the function of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "predict":
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_parallel.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_parallel.planner.{_HOME[name]}"), name)
