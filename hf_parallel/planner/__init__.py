"""Which layout, will it fit, how fast: a prediction without a process group, a GPU or weights."""

from hf_parallel.planner.hardware import Cluster, Gpu, Link, find_gpu, find_link, make_cluster
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
