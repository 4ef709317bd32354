"""Loops without a Trainer that were written for DDP: their own losses, `model.module`, groups, what a model draws."""

import copy

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from hf_parallel.ask.config import SpecError
from hf_parallel.hooks import report, runtime
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.loops import prepare_loop, rows, take_step
from tests.rows import Rows
from tests.training import activate, check_alone

ROWS = 8


def of_model(accelerator, model, batch):
    return model(**batch).loss / 2


def of_model_in_eval_mode(accelerator, model, batch):
    return of_model(accelerator, model.eval(), batch)  # as `from_pretrained` leaves it


def summed(accelerator, model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum").view(())


def summed_for_all(accelerator, model, batch):
    return summed(accelerator, model, batch) * accelerator.num_processes


def squares(accelerator, model, batch):
    return (model(input_ids=batch["input_ids"]).logits ** 2).sum()


def of_logits(accelerator, model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def of_logits_scaled(accelerator, model, batch):
    """Half of the classes weigh twice."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    weights = 1 + torch.arange(logits.shape[-1]) % 2
    criterion = torch.nn.CrossEntropyLoss(weight=weights.to(logits))
    return (0.5 * criterion(logits.transpose(1, 2), batch["labels"][:, 1:]) / 3).view(1)


def of_logits_weighed_by_hand(accelerator, model, batch):
    """A script that weighs its rank's mean by itself."""
    count = (batch["labels"][:, 1:] != -100).sum()
    total = accelerator.reduce(count.clone())
    return of_logits(accelerator, model, batch) * count * accelerator.num_processes / total


def of_logits_and_squares(accelerator, model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    return loss + 0.01 * logits.square().mean()


def paired(accelerator, model, batch):
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    one, other = states[-1][:, -1], states[1].mean(1)
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def paired_over_ranks(accelerator, model, batch):
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    one, other = states[-1][:, -1], states[1].mean(1)
    if accelerator.num_processes > 1:
        one, other = (torch.cat(dist.nn.all_gather(part.contiguous())) for part in (one, other))
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def gather_by_hand(part):
    """As in SimCSE, Tevatron and FlagEmbedding: this rank's part has gradients, the others' not."""
    parts = [torch.zeros_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(tensor_list=parts, tensor=part.contiguous())
    parts[dist.get_rank()] = part
    return torch.cat(parts)


def paired_by_hand(accelerator, model, batch):
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    one, other = states[-1][:, -1], states[1].mean(1)
    if accelerator.num_processes > 1:
        one, other = gather_by_hand(one), gather_by_hand(other)
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def paired_by_hand_for_all(accelerator, model, batch):
    return paired_by_hand(accelerator, model, batch) * accelerator.num_processes


def late_interaction(accelerator, model, batch):
    """As ColPali: gradients of what is gathered are transposed in memory."""
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    queries, documents, place = states[-1], states[1], torch.arange(len(states[1]))
    if accelerator.num_processes > 1:
        documents, place = torch.cat(dist.nn.all_gather(documents)), place + dist.get_rank() * len(documents)
    scores = torch.einsum("bnd,csd->bcns", queries, documents).amax(3).sum(2)
    return functional.cross_entropy(scores, place)


def step(spec, folder, loss_of):
    """The gradient norm of a batch, and the lines about losses of a script's own."""
    accelerator, model, _ = prepare_loop(spec, folder)
    lines = []
    report.say = lines.append
    for batch in accelerator.prepare(DataLoader(Rows(ROWS, 11), ROWS // accelerator.num_processes)):
        accelerator.backward(loss_of(accelerator, model, batch))
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    told = [line for line in lines if "own loss" in line or "is a sum" in line or "compares" in line]
    return norm, told


@pytest.mark.parametrize(
    ("loss_of", "words", "equal"),
    [
        (of_model, [], True),
        (of_model_in_eval_mode, [], True),
        (summed, ["loss * accelerator.num_processes"], False),
        (summed_for_all, ["taken for a mean over examples"], True),
        (squares, ["loss * accelerator.num_processes"], False),
        (of_logits, [], True),
        (of_logits_scaled, [], True),
        (of_logits_weighed_by_hand, [], True),
        (of_logits_and_squares, ["taken for a mean over examples"], False),
        (paired, ["compares each example"], False),
        (paired_over_ranks, [], True),
        (paired_by_hand, ["all_gather hands no gradients on"], False),
        (paired_by_hand_for_all, ["all_gather hands no gradients on"], True),
        (late_interaction, [], True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_line_says_what_data_ranks_make_of_a_loss(runs, loss_of, words, equal):
    """Numbers are those of one process, or a line names the difference and what to write."""
    expected, none = run_alone(step, None, runs.initial("llama"), loss_of)
    ranks = run(step, 2, "dp_shard=2", runs.initial("llama"), loss_of, init=False)
    assert not none
    for norm, told in ranks:
        assert len(told) == len(words)
        assert all(word in line for word, line in zip(words, told, strict=True))
        if equal:
            assert norm == pytest.approx(expected, rel=1e-5)
        if words == ["loss * accelerator.num_processes"] or loss_of is paired_by_hand:
            assert norm * 2 == pytest.approx(expected, rel=1e-5)


def step_without_accelerator(spec, folder):
    """The lines about a step of torch's own `loss.backward()`."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    lines = []
    report.say = lines.append
    for batch in accelerator.prepare(DataLoader(Rows(ROWS, 11), ROWS // accelerator.num_processes)):
        of_logits(accelerator, model, batch).backward()
        optimizer.step()
    return [line for line in lines if "accelerator.backward(loss) weighs them" in line]


def test_a_line_says_that_a_backward_pass_is_not_weighed(runs):
    assert not run_alone(step_without_accelerator, None, runs.initial("llama"))
    ranks = run(step_without_accelerator, 2, "dp_shard=2", runs.initial("llama"), init=False)
    assert all(len(told) == 1 for told in ranks)


def gather_into_tensor(part):
    """As a loss of its own backward pass would."""
    whole = part.new_zeros(dist.get_world_size() * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous())
    return whole


def gather_with_autograd(part):
    return functional_collectives.all_gather_tensor_autograd(part, 0, dist.group.WORLD)


def gather_all_processes(spec, folder):
    """Compare examples of all processes, which have the same ones here."""
    accelerator, model, _ = prepare_loop(spec, folder)
    for batch in accelerator.prepare(DataLoader(Rows(ROWS, 11), ROWS // accelerator.num_processes)):
        states = model(input_ids=batch["input_ids"]).logits.mean(1)
        for gather in (gather_by_hand, dist.nn.all_gather, gather_into_tensor, gather_with_autograd):
            with pytest.raises(SpecError, match=rf"{spec[:2]}_size=2 .*dp_shard_size={dist.get_world_size()}"):
                gather(states)
        with torch.no_grad():  # for a metric
            assert len(gather_by_hand(states)) == len(states) * dist.get_world_size()
        break


@pytest.mark.parametrize("spec", ["tp=2", "cp=2"])
def test_a_loss_does_not_compare_examples_with_themselves(runs, spec):
    """Each negative would be there twice: the loss of one process and log(2)."""
    run(gather_all_processes, 2, spec, runs.initial("llama"), init=False)


def gather_ragged_batches(spec, folder, drop_last):
    """Gather the first of two batches, of which the second is half full."""
    accelerator, model, _ = prepare_loop(spec, folder)
    loader = accelerator.prepare(DataLoader(Rows(ROWS * 3 // 2, 11), ROWS // 2, drop_last=drop_last))
    batch = next(iter(loader))
    return len(gather_by_hand(model(input_ids=batch["input_ids"]).logits.mean(1)))


def test_a_loss_does_not_compare_repeated_examples(runs):
    """Those that fill a ragged last batch would be compared twice; a loader without one works."""
    with pytest.raises(RankFailure, match=rf"only {ROWS // 2} of the last batch's {ROWS} .*drop_last=True"):
        run(gather_ragged_batches, 2, "dp_shard=2", runs.initial("llama"), False, init=False)
    assert run(gather_ragged_batches, 2, "dp_shard=2", runs.initial("llama"), True, init=False) == [ROWS, ROWS]


class OwnSum(LlamaForCausalLM):
    """A model whose own loss is a sum, as that of Wav2Vec2ForPreTraining."""

    def forward(self, input_ids=None, labels=None):
        logits = super().forward(input_ids=input_ids).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return CausalLMOutput(loss=loss + 0.1 * logits.mean(), logits=logits)


def step_of_own_sum(spec, folder, lines):
    """What is said of the model's loss."""
    activate(spec)
    report.say_here = lambda mesh, line: lines.append(line)
    model, ids = Accelerator(cpu=True).prepare(OwnSum.from_pretrained(folder).train()), torch.arange(34).view(2, 17)
    model(input_ids=ids, labels=ids).loss.backward()
    return [line for line in lines if "OwnSum" in line]


def test_a_models_own_sum_is_not_called_a_mean(runs):
    for told in run(step_of_own_sum, 2, "dp_shard=2", runs.initial("llama"), [], init=False):
        assert [line for line in told if "is a sum over the targets" in line and "multiplies by 2" in line] == told
        assert len(told) == 1


def other_backward_passes(spec, folder):
    """What is said of gradients that a loop does not take from one backward pass."""
    activate(spec)
    model, tokens = Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(folder)).train(), rows(4, 33)
    loss = model(input_ids=tokens, labels=tokens).loss
    with pytest.raises(NotImplementedError, match=r"loss\.backward\(\) and p\.grad"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    loss.backward(retain_graph=True)
    once = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    if "pp" in spec:
        with pytest.raises(NotImplementedError, match="sum of the losses"):
            loss.backward()
    else:
        loss.backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(2 * once)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "cp=2", "pp=2"])
def test_gradients_are_whole_or_refused(runs, spec):
    run(other_backward_passes, 2, spec, runs.initial("llama"), init=False)


def head_alone(spec, folder):
    """The gradient norms of a loop that trains the head, and from its second step on a layer of the first stage."""
    activate(spec)
    accelerator, model, norms = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(folder).train(), []
    model.model.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        if step == 1:
            late = [p for name, p in model.named_parameters() if "layers.0" in name]
            optimizer.add_param_group({"params": [p.requires_grad_(True) for p in late]})
        loss = model(input_ids=(tokens := rows(4, 33)), labels=tokens).loss
        norms.append(take_step(accelerator, model, optimizer, loss)[1])
    return norms


def test_a_stage_without_a_parameter_that_trains(runs):
    check_alone(head_alone, "pp=2", runs.initial("llama"), init=False)


def halfway_back(spec, folder):
    """The losses of a loop that goes half the way back to its first weights, as one vector."""
    _, model, optimizer = prepare_loop(spec, folder, rate=0.5)
    losses = []
    with torch.no_grad():
        first = nn.utils.parameters_to_vector(model.parameters())
    for _ in range(2):
        loss = model(input_ids=(tokens := rows(4, 33)), labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            now = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters((first + now) / 2, model.parameters())
        losses += [float(loss), len(now) / 1e4]
    if spec:
        with pytest.raises(NotImplementedError, match="no_grad"):
            nn.utils.parameters_to_vector(model.parameters())
    return losses


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_weights_as_one_vector(runs, spec):
    check_alone(halfway_back, spec, runs.initial("llama"), init=False)


def as_under_ddp(spec, folder):
    """What scripts do that expect DDP around their model."""
    activate(spec)
    lines = []
    report.say = lines.append
    dist.init_process_group("gloo")  # once more
    with pytest.raises(SpecError, match=r"world_size=3.*2 works"):
        dist.init_process_group("gloo", world_size=3, rank=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(SpecError, match=r"DistributedDataParallel.*prepare"):
        torch.nn.parallel.DistributedDataParallel(model)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    inner = model.module if accelerator.num_processes > 1 else model
    assert isinstance(inner, type(model))
    assert not hasattr(inner, "module")
    assert accelerator.unwrap_model(model) is model
    assert [*inner.parameters()] == [*model.parameters()]
    inner.marked = 3
    assert model.marked == 3
    assert isinstance(copy.deepcopy(model), type(model))
    return [line for line in lines if line.startswith("init_process_group")]


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_what_ddp_has(runs, spec):
    for told in run(as_under_ddp, 2, spec, runs.initial("llama"), init=False):
        assert len(told) == 1


def draws(spec):
    """The order of each of two epochs, and what a model would draw after its first batch."""
    activate(spec)
    accelerator, found = Accelerator(cpu=True), []
    torch.manual_seed(5)
    loader = accelerator.prepare(DataLoader(range(16), batch_size=8, shuffle=True))
    for batch in loader:
        found.append(batch.tolist())
        found.append(torch.rand(3).tolist())
    return found


def test_a_model_draws_as_in_one_process():
    """Ranks that share a model read data from a stream of their own, and the model's draws go on after it."""
    expected = run_alone(draws, None)
    for found in run(draws, 2, "tp=2", init=False):
        assert found == expected


def losses_kept(spec: str) -> int:
    """The losses that are held after forty forward passes whose backward pass Accelerate does not see."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(models.build("llama")).train()
    for _ in range(40):
        tokens = torch.arange(33)[None] % 515
        model(input_ids=tokens, labels=tokens).loss.backward()
    return len(runtime.current().loop.of_models)


@pytest.mark.parametrize(("spec", "most"), [("tp=2", 0), ("dp_replicate=2", 16)])
def test_losses_are_not_kept_for_ever(spec, most):
    assert max(run(losses_kept, 2, spec, init=False)) <= most
