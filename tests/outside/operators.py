"""Import torchvision beside a torch that its compiled part does not fit: import this before Transformers."""

import importlib.util

import torch


def define_missing() -> torch.library.Library | None:
    """Declare the two operators that torchvision's Python part expects; nobody calls them here."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # the compiled part is there, and declares them itself
        return None
    return library


LIBRARY = define_missing()  # the declaration ends with its last name
