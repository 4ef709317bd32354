"""Sequences over ranks by the flash kernels of a GPU: stand-ins of their signatures here, they where there is one."""

import contextlib
import dataclasses
from importlib import metadata
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from hf_parallel.ask.config import SpecError
from hf_parallel.axes import attention_kernel as kernels_of_packages
from hf_parallel.axes.context import flash
from hf_parallel.axes.context.attention import _attend_densely, _make_visibility_mask
from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.layout import Layout, Ring, Shape
from hf_parallel.axes.context.packs import make_unpacked_rows
from hf_parallel.axes.context.ring import RingAttention
from tests.context import all_steps, differences
from tests.distributed import run, run_alone
from tests.flash_kernels import check_refused, plan, standing_in
from tests.refusals import pattern_of_refusal
from tests.training import axes, none

KERNELS = ("auto", "flash_attention_2", "flash_attention_3")
CASES = {
    2: [("llama", "packed", "ring"), ("mistral", "padded", "ring"), ("gpt_oss", "ends", "allgather")],
    4: [("mistral", "packed", "ring"), ("gemma3", "packed", "hybrid:2"), ("bert", "classes", "ulysses")],
}


@contextlib.contextmanager
def packages():
    """As if both were installed, on a GPU that has what they need."""
    with standing_in(), mock.patch.object(kernels_of_packages, "_find_missing_feature", return_value=None):
        yield


def steps_by_kernels(cases):
    with packages():
        return all_steps(cases, True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_one_process(kernel, size):
    """Loss, gradient norm, gradients and weights; windows, sinks, packs, two key/value heads on four ranks."""
    cases = [
        (name, kind, f"cp={size},context_parallel={way},attention={kernel}", True, {})
        for name, kind, way in CASES[size]
    ]
    alone = run_alone(all_steps, cases, False)
    none(differences(cases, run(steps_by_kernels, axes(cases[0][2])["world"], cases), alone))


@pytest.mark.parametrize(
    ("name", "spec", "changes", "words"),
    [
        ("llama", "flash_attention_2", {}, ["the package flash-attn is not installed", "attention=auto works"]),
        ("llama", "flash_attention_3", {}, ["the package flash-attn-3 is not installed", "attention=auto works"]),
        ("llama", "flex_attention", {}, ["cp_size=2 merges blocks of sdpa, torch_flash", "attention=auto works"]),
        ("gemma2", "torch_flash", {}, ["attn_logit_softcapping=50", "attention=auto works"]),
    ],
)
def test_what_is_absent_is_refused(name, spec, changes, words):
    check_refused(name, f"cp=2,attention={spec}", words, **changes)


@pytest.mark.parametrize(
    ("changes", "version", "numbers"),
    [
        ({"attention_dropout": 0.1}, "2.8.3", ["attention_dropout=0.1"]),
        ({"head_dim": 264}, "2.8.3", [264, 256]),
        ({}, "2.6.3", ["2.6.3", "2.7"]),
    ],
)
def test_what_a_package_cannot_do_is_refused(changes, version, numbers, monkeypatch):
    monkeypatch.setattr(flash, "version", lambda name: version)
    line = pattern_of_refusal("attention=flash_attention_2", *numbers, works="attention=auto works")
    with packages(), pytest.raises(SpecError, match=line):
        plan("llama", "cp=2,attention=flash_attention_2", **changes)


def test_a_package_is_called():
    """The plan has it, and so has the attention of each layer."""
    with packages(), mock.patch.object(flash, "version", side_effect=metadata.PackageNotFoundError):
        found = plan("llama", "cp=2,attention=flash_attention_2")
    assert found.parts["cp"].config.attention == "flash_attention_2"


# ---- on a GPU ------------------------------------------------------------------------------------------------------

PACKAGES = {"auto": "torch", "flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def blocks(kernel, window, device):
    """Relative gaps of outputs and gradients in 16 bits to a matrix of scores: packs, windows, grouped keys, sinks."""
    row = dataclasses.replace(make_unpacked_rows(1, 33)[0], lengths=(5, 11, 2, 14, 1))
    layout, high = Layout([row] * 2, Shape(1, 1), 33), float("inf") if window is None else window - 1
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, heads, 33, 64, generator=generator).to(device).bfloat16() for heads in (4, 2, 2)]
    made.append(torch.linspace(-1, 1, 4, device=device))
    *inputs, sinks = (t.clone().requires_grad_() for t in made)
    *wide, wide_sinks = (t.float().clone().requires_grad_() for t in made)
    ours = RingAttention.apply(*inputs, sinks, Scores(0.125), Ring(layout, None, 0, high, kernel=kernel))
    hidden = ~_make_visibility_mask(layout, 0, high, torch.device(device))
    theirs = _attend_densely(*wide, hidden, 0.0, 0.125, None, wide_sinks)
    ours.sum().backward()
    theirs.sum().backward()
    grads = ((a.grad, b.grad) for a, b in zip([*inputs, sinks], [*wide, wide_sinks], strict=True))
    return [float((a.float() - b).abs().max() / b.abs().max()) for a, b in [(ours, theirs), *grads]]


@pytest.mark.parametrize("kernel", PACKAGES)
def test_blocks_of_stand_ins(kernel):
    """What the next test does on a GPU."""
    with packages():
        assert max(blocks(kernel, 5, "cpu")) <= 0.03  # a few steps of bf16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", PACKAGES)
def test_blocks_of_the_kernels_themselves(kernel, window):
    if find_spec(PACKAGES[kernel]) is None:
        pytest.skip(f"{PACKAGES[kernel]} is not installed")
    assert max(blocks(kernel, window, "cuda")) <= 0.03
