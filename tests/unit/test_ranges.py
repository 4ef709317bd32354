"""Ranges of a safetensors file: the same values as indexing gives, and no more bytes than they have."""

import os
import random

import pytest
import torch
from safetensors.torch import save_file

from hf_parallel.checkpoint import lazy_tensor
from hf_parallel.checkpoint.lazy_tensor import RangeFile

SHAPES = {
    "scalar": (),
    "vector": (7,),
    "matrix": (12, 10),
    "stacked": (5, 6, 4),
    "deep": (3, 2, 4, 5),
    "empty": (0, 3),
}


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    tensors = {
        f"{n}-{d}": torch.randn(shape).to(d) for n, shape in SHAPES.items() for d in (torch.float32, torch.bfloat16)
    }
    tensors |= {"whole numbers": torch.arange(60).view(12, 5), "flags": torch.arange(9) % 2 == 0}
    save_file(tensors, tmp_path / "some.safetensors")
    return str(tmp_path / "some.safetensors"), tensors


@pytest.mark.parametrize("block", [1, 64, 16 << 20])
def test_the_same_as_indexing(saved, monkeypatch, block):
    monkeypatch.setattr(lazy_tensor, "BLOCK", block)
    path, tensors = saved
    draw = random.Random(1)
    with RangeFile(path) as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            source = file.get_slice(name)
            assert source.get_shape() == list(tensor.shape)
            assert torch.equal(source[...], tensor)
            assert source[...].dtype == tensor.dtype
            for _ in range(20):
                bounds = [sorted(draw.choices(range(size + 1), k=2)) for size in tensor.shape]
                part = tuple(slice(*pair) for pair in bounds)
                if part:
                    assert torch.equal(source[part], tensor[part])


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.mark.parametrize(
    ("part", "share"), [((slice(0, 100),), 0.1), ((slice(900, 1000), slice(0, 500)), 0.1), ((slice(0, 0),), 0)]
)
def test_only_these_bytes_are_read(tmp_path, part, share):
    tensor = torch.randn(1000, 500)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    with RangeFile(str(tmp_path / "a.safetensors")) as file:
        before = bytes_read()
        found = file.get_slice("a")[part]
        assert bytes_read() - before < share * tensor.nbytes + 4096
    assert torch.equal(found, tensor[part])


def test_a_file_that_is_cut_off(saved):
    path, _ = saved
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(ValueError, match="some.safetensors is cut off"):
        RangeFile(path)
    os.truncate(path, 5)
    with pytest.raises(ValueError, match="no safetensors file"):
        RangeFile(path)
