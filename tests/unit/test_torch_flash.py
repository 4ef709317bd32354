"""torch's flash kernels against a matrix of scores: their packing, their windows and sinks, and who may have them."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma2PreTrainedModel

from hf_parallel import ParallelConfig
from hf_parallel.axes import attention_kernel as axis
from hf_parallel.axes import torch_flash as flash
from hf_parallel.axes.attention_kernel import Kernel, choose_kernel_for_auto, read_attention
from hf_parallel.axes.context.flash import TORCH
from hf_parallel.axes.context.kernels import Scores
from tests import models
from tests.context import batch
from tests.flash_kernels import check_refused, plan, standing_in


@pytest.fixture
def on_cuda(monkeypatch):
    """The kernel of CUDA, in arithmetic: what is around it runs."""
    monkeypatch.setattr(flash, "can_take_queries", lambda q: True)
    with standing_in():
        yield


def test_the_trial_of_the_kernel(on_cuda, monkeypatch):
    """It passes with a right kernel, and tells a wrong one: no window."""
    assert flash.measure_gap("cpu", torch.float32, 16) < 1e-5
    monkeypatch.setattr(flash.Pack, "call", lambda packed, window, call=flash.Pack.call: call(packed, (-1, 0)))
    assert flash.measure_gap("cpu", torch.float32, 16) > 0.05


def test_an_error_in_the_trial():
    assert isinstance(flash.measure_gap("cpu", torch.float32, 16), str)  # there is none on a CPU


def test_the_call_of_the_kernel():
    """Names and shapes, as torch knows them without a GPU."""
    q, k = (torch.empty(33, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    call = flash.Pack(torch.empty(4, dtype=torch.int32, device="meta"), 20, None).call((6, 0))
    out, lse = TORCH.forward(q, k, k, call, Scores(0.25))
    assert (out.shape, lse.shape) == (q.shape, (33, 4))
    given = TORCH.backward(q, q, k, k, out, lse, call, Scores(0.25))
    assert [t.shape for t in given] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("kind", ["ends", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3"])
def test_both_ways_are_one(name, kind, on_cuda, monkeypatch):
    """The variable-length kernel, and document by document: logits and gradients; sinks, windows, padding."""
    flash.register_torch_flash()
    found = []
    for one_call in (True, False):
        monkeypatch.setattr(flash, "can_take_queries", lambda q, fits=one_call: fits)
        model = models.build(name, attn_implementation="eager").train()
        model.set_attn_implementation(flash.NAME)
        model(**batch(kind)).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][key], rtol=0, atol=2e-6, msg=key)  # another order of sums


def test_masks_that_it_does_not_know():
    """Image tokens that see later ones, and a script's own mask, are refused when they come."""
    from transformers.masking_utils import create_causal_mask

    flash.register_torch_flash()
    config = models.llama()
    config._attn_implementation = flash.NAME
    given = {"config": config, "inputs_embeds": torch.zeros(1, 6, 64), "attention_mask": None, "past_key_values": None}
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    with pytest.raises(NotImplementedError, match="of an image.*attention=sdpa works"):
        create_causal_mask(**given, block_sequence_ids=blocks)
    with pytest.raises(NotImplementedError, match="made itself.*attention=sdpa works"):
        create_causal_mask(**given, and_mask_function=lambda b, h, q, k: q - k < 3)


def test_boundaries_without_positions():
    """A collator may give `cu_seq_lens_q` alone, which `sdpa` does not read."""
    flash.register_torch_flash()
    model = models.build("llama").eval()
    model.set_attn_implementation(flash.NAME)
    tokens = batch("plain")["input_ids"][:1]
    ends = torch.tensor([0, 13, 33], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    changed = tokens.clone()
    changed[:, :13] = changed[:, :13].flip(1)
    with torch.no_grad():
        gap = (model(tokens, **given).logits - model(changed, **given).logits).abs().amax(-1)[0]
    assert gap[13:].max() == 0
    assert gap[:13].max() > 0.1


def test_generation():
    """With a cache and padding, as by `sdpa`."""
    flash.register_torch_flash()
    tokens, mask = torch.arange(14).view(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    rows = []
    for kernel in ("sdpa", flash.NAME):
        model = models.build("mistral").eval()
        model.set_attn_implementation(kernel)
        rows.append(model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False))
    assert torch.equal(*rows)


#: Transformers to 5.20 gives Gemma 2 sdpa, without its soft cap.
CAPPED = pytest.mark.skipif(bool(Gemma2PreTrainedModel._supports_sdpa), reason="Gemma 2 has no soft cap here")


# ---- who may have what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "changes", "words"),
    [
        ("gemma2", "torch_flash", {}, ["attn_logit_softcapping=50", "attention=eager works"]),
        pytest.param("gemma2", "sdpa", {}, ["scaled_dot_product_attention", "attention=eager works"], marks=CAPPED),
        ("llama", "torch_flash", {"attention_dropout": 0.1}, ["attention_dropout=0.1", "attention=sdpa works"]),
        ("mpt", "torch_flash", {}, ["an attention of its own"]),
        ("llama", "flash_attention_2", {}, ["the package flash-attn is not installed", "attention=sdpa works"]),
        ("llama", "flash_attention_3", {}, ["the package flash-attn-3 is not installed"]),
        ("gpt_oss", "flash_attention_4", {}, ["the package flash-attn-4 is not installed", "attention=eager works"]),
    ],
)
def test_what_cannot_run_is_refused(name, spec, changes, words):
    check_refused(name, f"attention={spec}", words, **changes)


def test_a_package_without_its_gpu():
    facts = read_attention(models.build("llama"), ParallelConfig())
    assert "here is cpu" in axis._find_missing_feature("flash_attention_2", facts)
    older = replace(facts, device="cuda", capability=(8, 0), dropout="attention_dropout=0.1")
    assert "here is one of 8.0" in axis._find_missing_feature("flash_attention_3", older)
    assert axis._find_missing_feature("flash_attention_2", older) is None
    assert "would be left out" in axis._find_missing_feature("flash_attention_3", replace(older, capability=(9, 0)))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {}, "attention=torch_flash: packs and padded rows"),
        ("mistral", {}, "windows of 8 tokens without a mask"),
        ("gpt_oss", {}, "attention=torch_flash: "),
        pytest.param("gemma2", {}, "attention=eager: attn_logit_softcapping=50", marks=CAPPED),
        ("llama", {"attn_implementation": "eager"}, "attention=eager: the script's own choice"),
        ("llama", {"attention_dropout": 0.1}, "attention=sdpa: attention_dropout=0.1"),
        ("llava", {}, "because it reads more than tokens"),
        ("llama", {"head_dim": 12}, "heads of 12 numbers"),
    ],
)
def test_what_auto_takes_on_a_gpu(name, changes, words, monkeypatch):
    monkeypatch.setattr(axis, "measure_gap", lambda *given: 0.001)
    facts = read_attention(models.build(name, **changes), ParallelConfig())
    there = replace(facts, device="cuda", capability=(9, 0), dtype=torch.bfloat16)
    part = choose_kernel_for_auto(ParallelConfig(), there)
    assert words in f"attention={part.name}: {part.why}"
    assert part.own == (part.name != "torch_flash")


def test_what_auto_takes_here(monkeypatch):
    """Its own kernel, and why; on a GPU whose kernel fails its trial or where weights are wide, too."""
    assert plan("llama", "dp_shard=1").notes[:1] == (
        "attention=sdpa: the model's own, where there is no CUDA device; "
        "attention=torch_flash would keep packed examples apart without a mask",
    )
    facts = read_attention(models.build("llama"), ParallelConfig())
    there = replace(facts, device="cuda", capability=(9, 0))
    assert "weights are in float32" in choose_kernel_for_auto(ParallelConfig(), there).why
    monkeypatch.setattr(axis, "measure_gap", lambda *given: "no kernel image")
    failed = choose_kernel_for_auto(ParallelConfig(), replace(there, dtype=torch.float16))
    assert failed == Kernel("sdpa", "torch's flash kernel fails a trial here (no kernel image)", own=True)
    assert choose_kernel_for_auto(ParallelConfig(cp_size=2), there) is None
