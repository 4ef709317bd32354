"""`tp_overlap=true` changes when things are communicated, not what comes out."""

import pytest
import torch

from tests.training import BF16, Script, over

KEY = ",tp_overlap=true"


@over("tp_overlap", "tp=2", "tp=4", "tp=2,pp=2", "tp=2,dp_shard=2")
def test_llama(runs, spec):
    runs.check(Script().with_accumulation(2), spec + KEY)


@over("tp_overlap", "tp=2", "tp=2,dp_shard=2")
def test_checkpointing(runs, spec):
    runs.check(Script(), f"{spec},activation_checkpointing=full{KEY}")


@over("tp_overlap", "tp=2")
def test_whole_sequences(runs, spec):
    runs.check(Script(), f"{spec},sequence_parallel=false{KEY}")


@over("tp_overlap", "tp=2")
@pytest.mark.parametrize("model", ["odd", "gpt2", "phi3", "falcon", "t5", "bert", "deepseek_v3"])
def test_other_families(runs, spec, model):
    """Odd lengths, Conv1D, packed weights, residuals added in place, a second input, gathered latents."""
    runs.check(Script(model=model), spec + KEY)


@over("tp_overlap", "tp=2")
def test_bf16(runs, spec):
    runs.check(Script(arguments=(("bf16", True),)), spec + KEY, BF16)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="refused with it before torch 2.13")
@over("tp_overlap", "tp=2,pp=2")
def test_split_backward(runs, spec):
    """Zero-bubble schedules ask for gradients of inputs and of weights at different times."""
    runs.check(Script(), f"{spec},pipeline_schedule=zbv_zero_bubble{KEY}")
