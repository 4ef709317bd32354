"""Parts of tensors: which part a rank stores, and conversions on tensors that are read part by part."""

import pytest
import torch
from transformers import core_model_loading as loading

from hf_parallel.checkpoint.lazy_tensor import LazyTensor, make_lazy_tensor
from hf_parallel.checkpoint.slices import read_part


class Model:
    """What operations ask a model for: the shape of a target."""

    config = type("Config", (), {"num_attention_heads": 2, "get_text_config": lambda self: self})()

    def __init__(self, *shape: int):
        self.shape = shape

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shape)


def source(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


SPLIT = getattr(loading, "Split", loading.Chunk)  # new in transformers after 5.16
CHUNK, JOIN, STACK = loading.Chunk(dim=0), loading.Concatenate(dim=1), loading.MergeModulelist(dim=0)
ROPE = loading.PermuteForRope(permute_layer_names=["a", "b"])
#: Name: (sources by pattern, targets, operations, model).
CONVERSIONS = {
    "experts": ({"x": [source(3, 5) for _ in range(4)], "y": [source(3, 5) for _ in range(4)]}, ["a"], [STACK, JOIN]),
    "stack": ({"x": [source(3, 5) for _ in range(4)]}, ["a"], [STACK]),
    "join": ({"x": [source(2, 3)], "y": [source(2, 4)]}, ["a"], [JOIN]),
    "split": ({"x": [source(12, 5)]}, ["a", "b", "c"], [CHUNK]),
    "split unevenly": ({"x": [source(6, 5)]}, ["a", "b"], [SPLIT(dim=0)], Model(3, 5)),
    "split of a bias": ({"x": [source(12)]}, ["a", "b", "c"], [CHUNK]),
    "rope": ({"x": [source(24, 5)]}, ["a", "b", "c"], [CHUNK, ROPE]),
    "transpose": ({"x": [source(4, 5)]}, ["a"], [loading.Transpose(0, 1)]),
    "transpose if need be": (
        {"x": [source(3, 4, 5)]},
        ["a"],
        [loading.Transpose(1, 2, check_dims=True)],
        Model(3, 5, 4),
    ),
    "interleave": ({"x": [source(3, 8, 5)]}, ["a", "b"], [loading.Interleave(dim=1), loading.Chunk(dim=1)]),
    "two kinds of experts": (
        {"x": [source(3, 5) for _ in range(4)], "y": [source(3, 5) for _ in range(4)]},
        ["a", "b"],
        [loading.ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)],
    ),
}


def convert(sources: dict, targets: list[str], operations: list, model: Model | None = None) -> dict:
    converter = loading.WeightConverter(list(sources), list(targets), operations)
    for pattern, tensors in sources.items():
        for i, tensor in enumerate(tensors):
            converter.add_tensor("a", f"{pattern}.{i}", pattern, tensor)
    made = converter.convert("a", model=model, config=Model.config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_part_by_part(name):
    """Whole, in any part, and in any order of indices: what the operations give on values."""
    sources, *rest = CONVERSIONS[name]
    expected = convert(sources, *rest)
    lazy = convert({pattern: [make_lazy_tensor(t) for t in tensors] for pattern, tensors in sources.items()}, *rest)
    assert lazy.keys() == expected.keys()
    for key, whole in expected.items():
        assert isinstance(lazy[key], LazyTensor)
        assert lazy[key].shape == whole.shape
        assert torch.equal(lazy[key].whole(), whole)
        for keep in (1, 2, 3):
            part = tuple(torch.randperm(size)[: (size + keep - 1) // keep] for size in whole.shape)
            assert torch.equal(lazy[key].part(part), read_part(whole, part))
        nothing = (torch.arange(0), *(torch.arange(size) for size in whole.shape[1:]))
        assert lazy[key].part(nothing).shape == (0, *whole.shape[1:])


@pytest.mark.parametrize("operation", [torch.unbind, lambda t: t.sort(dim=1), lambda t: [t.reshape(3, 8) + 1]])
def test_other_operations(operation):
    """Done whole when read; each of several results is its own."""
    whole = source(4, 6)
    for lazy, expected in zip(operation(make_lazy_tensor(whole)), operation(whole), strict=True):
        assert torch.equal(lazy.whole(), expected)


def test_only_the_part_is_read():
    """Two of four experts, of each the upper half of two joined sources: a quarter of the values."""
    seen = []

    class Source:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return list(self.tensor.shape)

        def __getitem__(self, ranges):
            seen.append(self.tensor[ranges].numel())
            return self.tensor[ranges]

    sources = {p: [make_lazy_tensor(Source(source(6, 5)), torch.float32) for _ in range(4)] for p in "xy"}
    made = convert(sources, ["a"], [STACK, JOIN])["a"]
    assert not seen
    made.part((torch.arange(2, 4), torch.arange(6), torch.arange(5)))
    assert seen == [30, 30]
