"""Head and loss in chunks: losses, gradients and logits of the plain way, and memory that grows with the chunk."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_parallel import clip_grad_norm, parallelize
from hf_parallel.axes import chunked_loss
from hf_parallel.axes.chunked_loss import compute_fewest_tokens
from hf_parallel.axes.tensor import lean_loss
from hf_parallel.axes.tensor.vocab_parallel import Scaling
from hf_parallel.model.calls import note_unread_logits
from tests import loops, models
from tests.activations import Alive
from tests.distributed import run, run_alone, run_alone_once
from tests.training import axes, check_numbers

BEFORE_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="refused with it before torch 2.13")

CASES = [("llama", s) for s in ("dp_shard=1", "tp=2", "dp_shard=2", "tp=2,dp_shard=2", "cp=2")]
CASES += [("gemma2", "dp_shard=2"), ("gemma2", "tp=2"), ("command_r", "dp_shard=2"), ("gpt2", "tp=2")]


def trained(spec: str | None, model: str, reads: bool) -> tuple[list[float], int]:
    """Losses of steps that move the weights, what the logits say on the way, and how many losses were lean."""
    lean_loss.count_tokens_of_chunk, calls, real = lambda *_: 16, [], lean_loss._compute_loss_of_source
    lean_loss._compute_loss_of_source = lambda *given: (calls.append(given), real(*given))[1]
    built = models.build(model).train()
    if spec:
        parallelize(built, f"{spec},lean_loss=true")
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    tokens = torch.randint(0, models.VOCABULARY, (3, 4, 33), generator=torch.Generator().manual_seed(3))
    numbers = []
    for step, batch in enumerate(tokens):
        labels = batch.clone()
        labels[:, :7] = -100
        outputs = built(input_ids=batch, labels=labels)
        outputs.loss.backward()
        if step == 1 and reads:
            assert outputs.logits.shape == (4, 33, models.VOCABULARY)
            numbers.append(outputs.logits.float().square().mean().item())
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(outputs.loss.item())
    return numbers, len(calls)


@pytest.mark.parametrize(("model", "spec"), CASES)
def test_numbers_of_one_process(model, spec):
    """Soft caps, scaled logits, tied and untied heads; logits read after the backward."""
    expected, none = run_alone_once(trained, None, model, "pp=" not in spec)
    assert none == 0
    found = run(trained, axes(spec)["world"], spec, model, "pp=" not in spec)  # a pipeline keeps no logits
    assert any(lean for _, lean in found)
    check_numbers([numbers for numbers, _ in found], expected)


#: Rows and tokens of each data rank's batch: on both sides of the 100 tokens from which chunks pay here.
SIDES = ((8, 33), (2, 9))


def on_both_sides(spec: str | None, labelled: bool) -> list[list[float]]:
    """Losses and norms of three steps whose batches have 264 and 18 tokens, and as many targets."""
    lean_loss.compute_fewest_tokens, rank = lambda *_: 100, dist.get_rank() if spec else None
    model = models.build("llama").train()
    if spec:
        parallelize(model, spec)
    optimizer, draw, found = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(3), []
    for _ in range(3):
        batches = [torch.randint(0, models.VOCABULARY, shape, generator=draw) for shape in SIDES]
        losses = []
        for at, tokens in enumerate(batches):
            if rank in (None, at):
                labels = torch.full_like(tokens, -100)
                labels[:2, 1:9] = tokens[:2, 1:9]
                losses.append(loss_of(model, tokens, labels, labelled) / (1 if spec else 2))
        sum(losses).backward()
        norm = clip_grad_norm if spec else torch.nn.utils.clip_grad_norm_
        found.append([sum(losses).item(), float(norm(model if spec else model.parameters(), 1e9))])
        optimizer.step()
        optimizer.zero_grad()
    return found


def loss_of(model, tokens: torch.Tensor, labels: torch.Tensor, labelled: bool) -> torch.Tensor:
    """The model's own loss, or the script's of logits that nobody else reads."""
    if labelled:
        return model(input_ids=tokens, labels=labels).loss
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten())


@pytest.mark.parametrize("labelled", [True, False])
def test_data_ranks_on_both_sides_of_the_threshold(labelled):
    """None waits for another way through the head, and the numbers are those of one process."""
    expected, ranks = (
        run_alone(on_both_sides, None, labelled),
        run(on_both_sides, 2, "dp_shard=2", labelled, timeout=60),
    )
    for step, (loss, norm) in enumerate(expected):
        assert sum(rank[step][0] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-5)
        assert [rank[step][1] for rank in ranks] == pytest.approx([norm] * 2, rel=1e-5)


def unread(spec: str | None, reader: str) -> tuple[list[float], list[float], int]:
    """Losses where nobody reads logits but hooks of the script, what those read, and how many losses were lean."""
    lean_loss.count_tokens_of_chunk, lean_loss.compute_fewest_tokens = lambda *_: 11, lambda *_: 1
    calls, real = [], lean_loss._compute_loss_of_source
    lean_loss._compute_loss_of_source = lambda *given: (calls.append(given), real(*given))[1]
    built, seen = models.build("llama").train(), list[float]()
    if spec:
        parallelize(built, spec)
    if reader == "backward":
        built.lm_head.register_full_backward_hook(lambda _, inner, outer: seen.append(outer[0].norm().item()))
    elif reader == "forward":
        built.lm_head.register_forward_hook(lambda _, args, output: seen.append(output.detach().norm().item()))
    elif reader == "metric":

        @torch.no_grad()
        def norm(_, args, output):
            seen.append(output.norm().item())

        built.lm_head.register_forward_hook(norm)
    elif reader == "changes":
        built.lm_head.register_forward_hook(lambda _, args, output: output * 2 + 1)
    with note_unread_logits():
        return loops.losses(built, loops.rows(2, 4, 33)), seen, len(calls)


@pytest.mark.parametrize("spec", ["dp_shard=1", "dp_shard=2"])
@pytest.mark.parametrize("reader", ["nobody", "backward", "forward", "metric", "changes"])
def test_hooks_of_the_head(spec, reader):
    """By default, where a caller takes the loss alone: what hooks see and change is as of whole logits."""
    losses, seen, _ = run_alone(unread, None, reader)
    found, read, lean = zip(*run(unread, axes(spec)["world"], spec, reader), strict=True)
    check_numbers(found, losses)
    check_numbers(read, seen, 1e-4)  # norms of whole logits and of their gradients, after one step
    assert {count == 2 for count in lean} == {reader == "nobody"}


class Own(torch.autograd.Function):
    """A function of the script's own, which torch hands its arguments as they are."""

    @staticmethod
    def forward(ctx, logits, factor):
        return logits * 2 if factor == 2 else logits.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def of_an_own_function(spec: str, factor: int) -> str:
    """Why the backward pass stops where a hook of the head applies a function of its own; empty if it does not."""
    lean_loss.compute_fewest_tokens = lambda *_: 1
    model = models.build("llama").train()
    parallelize(model, spec)
    model.lm_head.register_forward_hook(lambda _, args, output: Own.apply(output, factor))
    with note_unread_logits():
        try:
            loops.losses(model, loops.rows(2, 4, 33))
        except NotImplementedError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("factor", [2, 3], ids=["that the loss could do", "that makes logits"])
@pytest.mark.parametrize("setting", ["", ",lean_loss=false"])
def test_functions_of_the_script_after_the_head(setting, factor):
    """Their backward pass would be left out without a word; what the error names works."""
    said = run(of_an_own_function, 2, f"dp_shard=2{setting}", factor)
    assert all(bool(words) == (not setting) and ("lean_loss=false works" in words or setting) for words in said), said


def left_to_loops(spec: str) -> int:
    """How many losses of a loop written by hand are lean, which reads logits after its optimizer's step."""
    lean_loss.compute_fewest_tokens, calls, real = lambda *_: 1, [], lean_loss._compute_loss_of_source
    lean_loss._compute_loss_of_source = lambda *given: (calls.append(given), real(*given))[1]
    model = models.build("llama").train()
    parallelize(model, spec)
    batch = loops.rows(4, 33)
    outputs = model(input_ids=batch, labels=batch)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert "pp=" in spec or outputs.logits.shape == (4, 33, models.VOCABULARY)
    return len(calls)


@pytest.mark.parametrize(
    ("spec", "lean"),
    [
        ("tp=2", False),
        ("pp=2", True),
        ("pp=2,pipeline_schedule=gpipe", False),
        ("pp=2,pipeline_schedule=gpipe,lean_loss=true", True),
        pytest.param("pp=2,pipeline_schedule=zbv_zero_bubble,lean_loss=true", True, marks=BEFORE_2_13),
    ],
)
def test_which_loops_are_lean(spec, lean):
    """A pipeline keeps no logits of its micro-batches anyway; with several that wait only who asks for it."""
    assert (sum(run(left_to_loops, 2, spec)) > 0) is lean


def test_from_how_many_tokens_it_pays():
    """Whole logits need less where a head's gradient, kept from the forward on, is larger than they are."""
    assert [compute_fewest_tokens(4096, *how) for how in ((True, 2, False), (False, 2, False), (True, 2, True))] == [
        2390,
        513,
        7168,
    ]


def of_loss(
    lean: bool, dtype: torch.dtype, scaling: Scaling, bias: bool, rounded: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The loss of 33 tokens over 515 words, and the gradients of hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(33, 24), (515, 24), (515,)][: 2 + bias]
    leaves = [torch.randn(shape, generator=generator).to(rounded).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, 515, (33,), generator=generator)
    target[::5] = -100
    if lean:
        loss = lean_loss._Chunked.apply(*leaves, *[None] * (not bias), target, target != -100, scaling, 11, None)
    else:
        logits = scaling.logits(torch.nn.functional.linear(*leaves))
        loss = ForCausalLMLoss(logits, None, 515, num_items_in_batch=11, shift_labels=target)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(scale=0.3), Scaling(softcap=2.0, scale=0.5)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_exact(monkeypatch, scaling, bias):
    monkeypatch.setattr(lean_loss, "count_tokens_of_chunk", lambda *_: 7)
    exact = of_loss(False, torch.float32, scaling, bias)
    for ours, theirs in zip(of_loss(True, torch.float32, scaling, bias), exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bf16_is_no_worse_than_plain(monkeypatch):
    """Both against fp32 on the same rounded numbers; weights' gradients are summed in fp32 here."""
    monkeypatch.setattr(lean_loss, "count_tokens_of_chunk", lambda *_: 7)
    exact = of_loss(False, torch.float32, Scaling(), False, rounded=torch.bfloat16)

    def off(lean: bool) -> list[float]:
        found = of_loss(lean, torch.bfloat16, Scaling(), False)
        return [(ours.float() - theirs).norm().item() for ours, theirs in zip(found, exact, strict=True)]

    lean, plain = off(True), off(False)
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(lean, plain, strict=True)), (lean, plain)


def peak(lean: bool, tokens: int, vocabulary: int) -> int:
    """Of head and loss, forward and backward, of 8 hidden features in bf16; no memory is taken."""
    with FakeTensorMode():
        hidden = torch.empty(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, 8, dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(tokens, dtype=torch.long)
        with Alive() as alive:
            if lean:
                loss = lean_loss._Chunked.apply(hidden, weight, None, target, target == 0, Scaling(), tokens, None)
            else:
                logits = torch.nn.functional.linear(hidden, weight)
                loss = ForCausalLMLoss(logits, None, vocabulary, num_items_in_batch=tokens, shift_labels=target)
            loss.backward()
    return alive.most


def test_memory_grows_with_the_chunk(monkeypatch):
    assert peak(True, 4096, 131072) <= peak(False, 4096, 131072) / 16
    assert peak(True, 8192, 131072) <= 1.05 * peak(True, 4096, 131072)  # not with the tokens
    half = peak(True, 4096, 131072)
    monkeypatch.setattr(lean_loss, "count_tokens_of_chunk", lambda *_: 2 * chunked_loss.CHUNK)
    assert peak(True, 4096, 131072) == pytest.approx(2 * half, rel=0.1)


def test_a_head_with_adapters_is_plain():
    """LoRA adds to what the head gives: its logits are made."""

    def losses(spec):
        from peft import LoraConfig, get_peft_model

        model = models.build("llama", tie_word_embeddings=False)
        if spec:
            parallelize(model, f"{spec},lean_loss=true")
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head", "q_proj"]))
        tokens = torch.arange(66).view(2, 33)
        return model.train()(input_ids=tokens, labels=tokens).loss.item()

    assert run(losses, 1, "dp_shard=1")[0] == pytest.approx(run_alone(losses, None), rel=1e-6)
