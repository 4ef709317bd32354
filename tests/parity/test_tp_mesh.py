"""Tensor parallelism on a grid of ranks (`tp_mesh=ROWSxCOLS`): weights cut along both dims, one process's numbers."""

import re

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_parallel import clip_grad_norm, full_state_dict, parallelize
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.plans import examine
from tests import models
from tests.adapters import ATTENTION, MLP, lora
from tests.distributed import run, run_alone
from tests.refusals import pattern_of_refusal
from tests.training import Script, check_alone

#: Shared keys, q and k norms, biases, soft caps, norms over all columns, packed and transposed weights, sinks,
#: experts, cross-attention.
FAMILIES = (
    "qwen3",
    "qwen2",
    "gemma2",
    "olmo2_eight",
    "phi3_eight",
    "gpt2",
    "gpt_oss",
    "mixtral",
    "falcon_rw",
    "bloom",
    "gptj",
    "t5",
    "bert",
    "bart",
    "deberta",
)
GRID = "tp=4,tp_mesh=2x2"
OTHERS = ("sequence_parallel=false", "pp=2", "cp=2", "dp_shard=2", "dp_replicate=2")
WAYS = ("full", "selective")
LAYOUTS = [f"{GRID},{others}" for others in (*OTHERS, *(f"activation_checkpointing={way}" for way in WAYS))]


#: Experts stay on all ranks of tp, whole ones or parts of each.
CASES = [*((model, GRID) for model in FAMILIES), ("gpt2_eight", "tp=8,tp_mesh=4x2"), ("mixtral", f"{GRID},ep=4")]


@pytest.mark.parametrize(("model", "spec"), [pytest.param("odd", GRID, marks=pytest.mark.support("tp_mesh")), *CASES])
def test_families(runs, model, spec):
    """A shared vocabulary of 515, rows of 15 tokens, key/value heads of two ranks; unequal numbers of targets."""
    runs.check(Script(model=model).with_accumulation(2), spec)


def stepped(spec):
    """Losses and gradient norms of three steps, and sums of each weight after them."""
    model = models.build("odd")
    share, shares = 0, 1
    if spec:
        model = parallelize(model, spec)
        mesh = model._hf_parallel.mesh
        share, shares = mesh.data_rank, mesh.data_size
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(3):
        ids = torch.randint(1, models.VOCABULARY, (4, 15), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(shares)[share]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip_grad_norm(model, 0.3) if spec else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if shares > 1:
            torch.distributed.all_reduce(loss.detach_(), group=mesh.data_group)
        found += [float(loss) / shares, float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    whole = full_state_dict(model) if spec else model.state_dict()  # of a layout on rank 0
    sums = [float(weight.double().abs().sum()) for _, weight in sorted(whole.items())]
    if spec:
        torch.distributed.broadcast_object_list(box := [sums])
        (sums,) = box
    return found + sums


@pytest.mark.parametrize("spec", LAYOUTS)
def test_layouts(spec):
    """Clipped at 0.3, so that a wrong norm shows in weights."""
    check_alone(stepped, spec)


def test_lora(runs):
    """On all linears and both ends, of which two ranks share a key/value head."""
    runs.check(Script(model="odd", lora=lora((*ATTENTION, *MLP, "embed_tokens"))), GRID)


@pytest.mark.parametrize("others", ["dp_shard=2", "pp=2", "pp=2,activation_checkpointing=selective"])
def test_lora_beside_other_axes(runs, others):
    runs.check(Script(model="odd", lora=lora((*ATTENTION, *MLP, "embed_tokens"))), f"{GRID},{others}")


@pytest.mark.parametrize("model", ["gpt2", "phi3_eight"])
def test_lora_of_packed_weights(runs, model):
    """Without sequence parallelism; GPT-2's with a bias that the first row adds."""
    targets = lora("all-linear", lora_bias=model == "gpt2")
    runs.check(Script(model=model, lora=targets), f"{GRID},sequence_parallel=false")


def generated(spec):
    """Greedy tokens after a prompt of odd length, and the whole logits of a row."""
    model = models.build("odd")
    if spec:
        parallelize(model, spec)
    model.eval().config.use_cache = True
    prompt = torch.arange(3, 8).view(1, 5)
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    return model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0).tolist(), logits


def test_generation_and_logits():
    """One token at a time, so with whole sequences, of which each rank has some features."""
    tokens, logits = run_alone(generated, None)
    for found, whole in run(generated, 4, "tp=4,tp_mesh=2x2"):
        assert found == tokens
        torch.testing.assert_close(whole, logits)


class AddsToItsInput(LlamaMLP):
    """Does more with its input than to multiply it."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x.mean(-1, keepdim=True)


class ReadsTheWidth(LlamaMLP):
    """Its input's last size decides what it gives."""

    def forward(self, x):
        return super().forward(x).view(*x.shape[:2], x.shape[-1])


@pytest.mark.parametrize("kind", [AddsToItsInput, ReadsTheWidth])
def test_code_that_reads_what_is_cut_is_refused(kind):
    """Columns of the grid would each read their own features; `tp=4` runs it."""
    with torch.device("meta"):
        model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
    found = examine(model, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems
    why = f"{kind.__name__} may do more with x than multiply it; tp=4 without tp_mesh works"
    assert found == [f"tp_mesh=2x2: {why}"]
    assert examine(model, ParallelConfig.parse("tp=4")).problems == []


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("deepseek_v3", "tp=4,tp_mesh=2x2", "q_a_proj stays whole and may read what is cut; tp=4 without tp_mesh"),
        ("phi3", "tp=4,tp_mesh=2x2", "ranks share keys that model.layers.0.self_attn.qkv_proj holds beside queries"),
        ("llama", "tp=4,tp_mesh=2x2,precision=int8", "tp_mesh=2x2 cuts products along both dims; precision=auto"),
    ],
)
def test_models_that_are_refused(name, spec, words):
    with torch.device("meta"):
        model = models.build(name)
    assert words in examine(model, ParallelConfig.parse(spec)).problems[0]


def test_columns_that_do_not_divide_the_widths():
    sizes = {"num_attention_heads": 4, "head_dim": 16, "intermediate_size": 132}
    with torch.device("meta"):
        even, odd = (models.build("qwen3", hidden_size=hidden, **sizes) for hidden in (66, 65))
    assert examine(even, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems == []
    (problem,) = examine(odd, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems
    what = (2, 65, "model.layers.0.self_attn.q_proj")
    assert re.search(pattern_of_refusal("tp_mesh=2x2", *what, works="tp=4 without tp_mesh works"), problem)
    assert examine(odd, ParallelConfig.parse("tp=4")).problems == []
