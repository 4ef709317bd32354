"""Sequences over cp ranks: loss, gradient norm, gradients and weights of one process, whoever holds which tokens."""

import pytest
import torch
import torch.distributed as dist

from tests import models
from tests.activations import own_bytes
from tests.adapters import lora
from tests.context import DOCUMENTS, all_steps, batch, differences
from tests.distributed import RankFailure, run, run_alone
from tests.refusals import pattern_of_refusal
from tests.resuming import ONE, STEPS, STOP, log_differences, trained
from tests.training import Script, axes, none


def check(*cases: tuple) -> None:
    """All cases have one number of ranks, and share their processes."""
    alone = run_alone(all_steps, list(cases), False)
    ranks = run(all_steps, axes(cases[0][2])["world"], list(cases), True)
    none(differences(list(cases), ranks, alone))


VARIANTS = {2: ("ring", "ulysses", "allgather"), 4: ("ring", "ulysses", "allgather", "hybrid:2")}


@pytest.mark.support("{name}, each variant")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt2", "bert"])
def test_variants(name, size):
    """33 tokens of padded rows and of packs; two key/value heads on four ranks."""
    kinds = ("classes", "classes") if name == "bert" else ("padded", "packed")
    cases = [
        (name, kind, f"cp={size},context_parallel={variant}", True, {})
        for variant, kind in zip(VARIANTS[size], kinds * 2, strict=False)
    ]
    check(*cases)


@pytest.mark.parametrize("spec", ["cp=2,context_parallel=ring", "cp=2,context_parallel=ulysses", "cp=2,pp=2"])
def test_documents_that_see_each_other(spec):
    """gpt-oss gives no positions to its masks: in one process a document of a pack reads the one before."""
    check(("gpt_oss", "packed", spec, True, {}))


@pytest.mark.support("ring, plain rows and packs")
@pytest.mark.parametrize(
    "spec",
    ["cp=2,tp=2", "cp=2,pp=2", "cp=2,tp=2,sequence_parallel=false", "cp=2,pp=2,pipeline_schedule=zbv_zero_bubble"],
)
def test_with_other_axes(spec):
    """Heads are split by tp first; what travels between stages is a cp rank's part."""
    check(*[("llama", kind, f"{spec},context_parallel=ring", True, {}) for kind in ("plain", "packed")])


@pytest.mark.support("Trainer")
@pytest.mark.parametrize(
    "spec",
    ["cp=2,dp_shard=2", "cp=2,pp=2,tp=2", "cp=4,dp_shard=2", "cp=2,dp_shard=2,tp=2", "cp=2,dp_replicate=2,pp=2"],
)
def test_a_trainer_script(runs, spec):
    """Evaluation, prediction and saving too; rows of unequal length, some without a label at a boundary."""
    runs.check(Script(uneven_lengths=True), spec)


@pytest.mark.support("Trainer, own loss")
@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=2,pp=2"])
def test_a_scripts_own_loss(runs, spec):
    """It reads logits of all tokens in their order, while it gives the labels to the model besides."""
    runs.check(Script(overrides=True), spec)


def test_a_loss_that_couples_tokens():
    check(*[("llama", "plain", f"cp=2,context_parallel={v}", False, {}) for v in ("ring", "ulysses")])


def square_of_outputs(name: str, spec: str | None, of_padding: bool, of_head: bool = False) -> float:
    """The mean square of a backbone's outputs, or of logits, which padding is left out of by a product."""
    import hf_parallel

    model, given = models.build(name), batch("padded")
    if not of_head:  # with labels each rank keeps logits of its tokens, until they are read
        del given["labels"]
    if spec:
        hf_parallel.parallelize(model, spec)
    outputs = model(**given).logits if of_head else model.base_model(**given).last_hidden_state
    kept = torch.ones_like(outputs) if of_padding else given["attention_mask"][..., None].expand_as(outputs)
    loss = (outputs * kept).pow(2).sum() / kept.sum()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(("name", "of_head"), [("bert", False), ("llama", False), ("llama", True)])
def test_a_loss_that_reads_padding(name, of_head):
    """One process computes outputs at padding, as those of ColBERT's longer queries, and cp computes none.

    Logits at padding are read by a divergence to a teacher's, as guides of distillation have it.
    """
    with pytest.raises(RankFailure, match=pattern_of_refusal("cp_size=2", 19, works="cp_size=1")):
        run(square_of_outputs, 2, name, "cp=2", True, of_head)
    assert run(square_of_outputs, 2, name, "cp=2", False, of_head) == pytest.approx(
        [run_alone(square_of_outputs, name, None, False, of_head)] * 2
    )


@pytest.mark.support("recomputed layers")
@pytest.mark.parametrize("spec", ["cp=2", "cp=2,pp=2"])
def test_recomputed_layers(spec):
    """A pack at a boundary between ranks, once more in the backward pass."""
    ways = ("ring", "ulysses", "ulysses,activation_checkpointing=selective")
    check(*[("llama", "packed", f"{spec},context_parallel={way}", True, {"checkpointed": True}) for way in ways])


ODD = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 7}


@pytest.mark.support("Gemma 2, odd heads")
@pytest.mark.parametrize("size", [2, 4])
def test_soft_caps_and_odd_heads(size):
    """Scores with a soft cap, of which one process makes other things at padding; three heads, seven layers."""
    variants = {2: ("ring", "ulysses"), 4: ("auto", "hybrid:2")}[size]
    kinds = zip(("packed", "ends"), variants, strict=True)
    cases = [("gemma2", kind, f"cp={size},context_parallel={way}", True, {}) for kind, way in kinds]
    check(*cases, ("llama", "padded", f"cp={size}", True, ODD))


def by_turns(spec: str | None) -> list[float]:
    """Losses and the gradient norm of batches of unlike documents, between which `auto` takes another variant."""
    import hf_parallel
    from hf_parallel.axes.context.choose import Choice

    model, losses = models.build("llama").train(), []
    if spec:
        hf_parallel.parallelize(model, spec)
    Choice.of = lambda choice, tokens, seen: choice.ways[round(seen) // 20]
    for step, kind in enumerate(("packed", "padded", "packed")):
        losses.append(model(**batch(kind, step)).loss)
        losses[-1].backward()
    return [*(loss.item() for loss in losses), float(hf_parallel.clip_grad_norm(model, 1e9))]


def test_another_variant_for_another_batch():
    alone = run_alone(by_turns, None)
    for rank in run(by_turns, 4, "cp=4"):
        assert rank == pytest.approx(alone, rel=1e-5)


@pytest.mark.support("Trainer, LoRA")
@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=4", "cp=2,tp=2", "cp=2,pp=2"])
def test_adapters(runs, spec):
    runs.check(Script(lora=lora("all-linear"), uneven_lengths=True).with_accumulation(2), spec)


@pytest.mark.support("resumed on other ranks")
@pytest.mark.parametrize(("source", "spec"), [("cp=2,dp_shard=2", "cp=4"), (ONE, "cp=2")])
def test_goes_on_over_other_ranks(runs, tmp_path, source, spec):
    """2e-5: two more AdamW steps, as where other layouts resume each other."""
    folder = runs.initial("qwen3")
    former = trained(source, {"folder": folder, "out": str(tmp_path / "former")})[0]
    job = {"folder": folder, "out": str(tmp_path / "later"), "resume": f"{former.folder}/checkpoint-{STOP}"}
    none(log_differences(trained(spec, job)[0], former, range(STOP + 1, STEPS + 1), 2e-5))


def others_unchanged(variants: tuple[str, ...]) -> list[float]:
    """How far the logits of other documents move when one is another; that of the changed one last."""
    import hf_parallel

    found = []
    for variant in variants:
        model = hf_parallel.parallelize(models.build("llama"), f"cp=2,context_parallel={variant}").eval()
        given = {key: value for key, value in batch("packed").items() if key != "labels"}
        changed = given["input_ids"].clone()
        start, end = sum(DOCUMENTS[:3]), sum(DOCUMENTS[:4])
        changed[0, start:end] = changed[0, start:end].flip(0)
        with torch.no_grad():
            gap = (model(**given).logits - model(**{**given, "input_ids": changed}).logits).abs().amax(-1)[0]
        inside = (torch.arange(len(gap)) >= start) & (torch.arange(len(gap)) < end)
        found += [gap[~inside].max().item(), -gap[inside].max().item()]
    return found


def test_a_document_sees_no_other():
    for rank in run(others_unchanged, 2, ("ring", "ulysses")):
        assert max(rank[::2]) == 0
        assert max(rank[1::2]) < -0.1


def generated(spec: str | None) -> list[torch.Tensor]:
    """With a cache and a padding mask; and hidden states beside a loss."""
    import hf_parallel

    model = models.build("llama").eval()
    if spec:
        hf_parallel.parallelize(model, spec)
    tokens = torch.arange(14).view(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    rows = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        outputs = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
    return [rows, outputs.hidden_states[2], outputs.logits]


def test_generation_and_outputs_are_whole():
    for rank in run(generated, 2, "cp=2,context_parallel=ring"):
        for ours, theirs in zip(rank, run_alone(generated, None), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)  # fp32 numbers of size 1


def attentions(spec: str) -> object:
    import hf_parallel

    model = models.build("llama", attn_implementation="eager").eval()
    hf_parallel.parallelize(model, spec)
    how = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_attentions": True, "use_cache": True}
    return model.generate(torch.arange(14).view(2, 7), **how).attentions


def test_scores_of_a_generation_are_refused():
    """A generation was cut nowhere, and gave None for them."""
    with pytest.raises(RankFailure, match="output_attentions=True needs whole matrices of scores; cp_size=1 works"):
        run(attentions, 2, "cp=2,context_parallel=ring")


class Sent:
    """Counts the bytes that this rank sends to other cp ranks, forward and backward, and the all-to-alls."""

    def __init__(self):
        self.bytes = self.exchanges = 0
        exchange, collect = dist.batch_isend_irecv, dist.all_to_all_single

        def point_to_point(operations):
            self.bytes += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
            return exchange(operations)

        def all_to_all(output, tensor, **kwargs):
            self.exchanges += 1
            self.bytes += tensor.nbytes * (kwargs["group"].size() - 1) // kwargs["group"].size()
            return collect(output, tensor, **kwargs)

        dist.batch_isend_irecv, dist.all_to_all_single = point_to_point, all_to_all


def sent(spec: str, checkpointed: bool, calls: bool = False) -> tuple[int, ...]:
    """Bytes forward and backward; with `calls` the all-to-alls of both, too."""
    import hf_parallel

    model = models.build("llama").train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    hf_parallel.parallelize(model, spec)
    counter, tokens = Sent(), torch.arange(128).view(2, 64)
    loss = model(input_ids=tokens, labels=tokens).loss
    forward, exchanges = counter.bytes, counter.exchanges
    loss.backward()
    found = forward, counter.bytes - forward
    return (*found, exchanges, counter.exchanges - exchanges) if calls else found


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_formulas(size):
    """4 layers, 2 rows of 64 tokens, 2 key/value heads and 4 query heads of 16 numbers in fp32; to the byte."""
    keys = 4 * 2 * (2 * 64 * 2 * 16) * 4 * (size - 1) // size
    for checkpointed in (False, True):  # a recomputed layer does not send keys again
        assert set(run(sent, size, f"cp={size},context_parallel=ring", checkpointed)) == {(keys, 2 * keys)}
    heads = 4 + 2 * max(2, size)  # q and k and v, which are repeated for four ranks; outputs go back beside them
    unit = 4 * (2 * 64 // size) * 4 * (size - 1) // size
    forward, backward = unit * (heads + 4) * 16, unit * ((heads + 4) * 16 + 4)  # a number for each query and head more
    again = {"none": 0, "full": unit * heads * 16, "selective": 0}
    for way, more in again.items():  # a recomputed layer sends q, k and v again, but for selective's
        spec, calls = f"cp={size},context_parallel=ulysses,activation_checkpointing={way}", 8 + 4 * (more > 0)
        assert set(run(sent, size, spec, False, True)) == {(forward, backward + more, 8, calls)}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_layer_keeps_its_part(size):
    """Bytes that autograd keeps in a layer, and what the planner says of all layers' activations."""
    whole = run_alone(own_bytes, None, torch.float32)
    for variant in ("ring", "ulysses"):
        for kept in run(own_bytes, size, f"cp={size},context_parallel={variant}", torch.float32):
            assert abs(kept * size / whole - 1) <= 0.02
