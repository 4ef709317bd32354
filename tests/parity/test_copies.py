"""Copies and averages of weights that a script makes before the layout divides the model: those of one process.

Sizes are odd: 515 rows of vocabulary, 3 layers, rows of 33 tokens; Phi-3 and Mixtral have packed weights.
"""

import copy
import os

import pytest
import torch
from accelerate import Accelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_parallel
from tests import models
from tests.distributed import RankFailure, run, run_alone_once
from tests.loops import take_step
from tests.training import TRAIN_SEED, activate, axes, close, none

ODD = {"num_hidden_layers": 3, "vocab_size": 515}
KEPT = 0.7
#: Relative; an average that misses one step is off by 1e-3 and more.
NEAR = 1e-5


class Listed:
    """Averages in lists, as models, of torch's, and by name, made anew each time."""

    def __init__(self, model):
        self.listed = [p.detach().clone() for p in model.parameters()]
        self.joined = [p.detach().clone() for p in model.parameters()]
        self.named = {name: p.data.clone() for name, p in model.named_parameters()}
        self.teacher, self.student = copy.deepcopy(model).requires_grad_(False), copy.deepcopy(model)
        self.swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(KEPT))

    def move(self, device):
        self.listed, self.joined = ([one.to(device) for one in kind] for kind in (self.listed, self.joined))
        self.named = {name: one.to(device) for name, one in self.named.items()}
        for model in (self.teacher, self.student, self.swa):
            model.to(device)

    @torch.no_grad()
    def update(self, model):
        parameters = list(model.parameters())
        for mean, p in zip(self.listed, parameters, strict=True):
            mean.sub_((1 - KEPT) * (mean - p))
        torch._foreach_lerp_(self.joined, parameters, 1 - KEPT)
        for name, p in model.named_parameters():
            self.named[name] = ((1 - KEPT) * p.data + KEPT * self.named[name]).clone()
        for mean, p in zip(self.teacher.parameters(), parameters, strict=True):
            mean.data.mul_(KEPT).add_(p.data, alpha=1 - KEPT)
        for mean, p in zip(self.student.parameters(), parameters, strict=True):
            mean.data = KEPT * mean.data + (1 - KEPT) * p.data
        self.swa.update_parameters(model)

    def numbers(self):
        """Norms of every average, which each rank holds whole."""
        named = [self.named[name] for name, _ in self.student.named_parameters()]
        kinds = (self.listed, self.joined, named, *(list(m.parameters()) for m in (self.teacher, self.student)))
        assert not any(type(one) is not torch.Tensor for one in (*self.listed, *self.joined, *named))
        return [one.double().norm().item() for kind in kinds for one in kind]


def averaging(kind, spec=None):
    """Three steps with averages after each, an evaluation with one of them swapped in, and one more step."""
    activate(spec)
    accelerator = Accelerator()
    model = models.build(kind, **ODD)
    averages = Listed(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    averages.move(accelerator.device)
    batches = torch.randint(0, 515, (4, 4, 33), generator=torch.Generator().manual_seed(TRAIN_SEED))
    batches = batches.to(accelerator.device)
    numbers = []
    for number, batch in enumerate(batches):
        numbers += take_step(accelerator, model, optimizer, model(input_ids=batch, labels=batch).loss)
        averages.update(model)
        if number == 2:
            kept = [p.detach().clone() for p in model.parameters()]
            for way in ("copy", "data", "state"):
                for mean, p in zip(averages.listed, model.parameters(), strict=True):
                    if way == "copy":
                        p.data.copy_(mean)
                    elif way == "data":
                        p.data = mean.clone()
                if way == "state":
                    accelerator.unwrap_model(model).load_state_dict(averages.teacher.state_dict())
                with torch.no_grad():
                    numbers.append(model(input_ids=batch, labels=batch).loss.item())
                for former, p in zip(kept, model.parameters(), strict=True):
                    p.data.copy_(former)
    for mean in (averages.teacher, averages.student, averages.swa):
        with torch.no_grad():
            numbers.append(mean(input_ids=batches[0], labels=batches[0]).loss.item())
    return numbers + averages.numbers()


CASES = [("llama", spec) for spec in ("dp_shard=2", "tp=2", "zero_stage=1,dp_shard=2", "dp_shard=2,tp=2")]
CASES += [("phi3", "tp=2"), ("phi3", "dp_shard=2,tp=2"), ("mixtral", "tp=2"), ("mixtral", "dp_shard=2,ep=2")]


@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_averages_made_before(kind, spec):
    wanted = run_alone_once(averaging, kind)
    for numbers in run(averaging, axes(spec)["world"], kind, spec, init=False):
        for number, (ours, theirs) in enumerate(zip(numbers, wanted, strict=True)):
            none(close(f"number {number}", ours, theirs, NEAR))


def mixing(spec, way):
    """What would make a weight of unlike parts."""
    activate(spec)
    accelerator = Accelerator()
    model = models.build("llama", **ODD)
    other = [p.detach() + int(os.environ["RANK"]) for p in model.parameters()]
    model = accelerator.prepare(model)
    other = [one.to(accelerator.device) for one in other]
    for own, p in zip(other, model.parameters(), strict=True):
        if way == "copy":
            p.data.copy_(own)
        elif way == "data":
            p.data = own
        else:
            p.data += own


@pytest.mark.parametrize("way", ["copy", "data", "add"])
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_refuses_what_ranks_have_otherwise(spec, way):
    """Numbers that each rank has drawn for itself do not become one weight."""
    with pytest.raises((RankFailure, NotImplementedError, hf_parallel.SpecError), match="have other numbers"):
        run(mixing, 2, spec, way, init=False)


LORA = {
    "lora": {"target_modules": ["q_proj", "o_proj", "embed_tokens"]},
    "dora": {"target_modules": ["v_proj", "o_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
    "added": {"target_modules": ["q_proj", "down_proj"]},
}


def copying(kind, spec=None):
    """Steps of a model with adapters and of its copy; the copy without adapters, merged, and copied when merged."""
    peft = pytest.importorskip("peft")
    activate(spec)
    model, config = models.build("llama", **ODD), peft.LoraConfig(r=3, init_lora_weights=False, **LORA[kind])
    model = hf_parallel.parallelize(model, spec) if spec else model
    torch.manual_seed(TRAIN_SEED)
    if kind == "added":
        from transformers.integrations import peft as integration

        integration.MIN_PEFT_VERSION = "0.20.0"  # Transformers 5.24 asks for a PEFT that is not out yet
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config)
    batch = torch.randint(0, 515, (4, 33), generator=torch.Generator().manual_seed(TRAIN_SEED)).to(model.device)
    numbers = []

    def fit(one, steps, learning_rate):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=learning_rate)
        for _ in range(steps):
            numbers.append((loss := one(input_ids=batch, labels=batch).loss).item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    fit(model, 1, 0.5)
    drawn, twin = torch.get_rng_state(), copy.deepcopy(model.train())
    assert type(twin) is type(model)
    assert torch.equal(drawn, torch.get_rng_state())
    fit(model, 2, 0.5)
    fit(twin, 3, 0.1)
    if kind != "added":
        twin.merge_adapter()
        again = copy.deepcopy(twin.eval())
        assert not again.training
        again.unmerge_adapter()
        with torch.no_grad(), again.disable_adapter():
            numbers.append(again(input_ids=batch, labels=batch).loss.item())
        whole = copy.deepcopy(again).merge_and_unload()
        numbers += [one(input_ids=batch, labels=batch).loss.item() for one in (whole, copy.deepcopy(whole))]
    fit(model, 1, 0.5)
    return numbers, sorted(n for n, p in hf_parallel.full_state_dict(twin).items() if p.is_floating_point())


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "dp_shard=2,tp=2", "pp=2,dp_shard=2"])
@pytest.mark.parametrize("kind", LORA)
def test_copies_with_adapters(kind, spec):
    wanted, names = run_alone_once(copying, kind)
    for rank, (numbers, own) in enumerate(run(copying, axes(spec)["world"], kind, spec, init=False)):
        assert own == ([] if rank else names)  # rank 0 has the whole state
        for number, (ours, theirs) in enumerate(zip(numbers, wanted, strict=True)):
            none(close(f"number {number}", ours, theirs, NEAR))


def copying_whole(spec):
    peft = pytest.importorskip("peft")
    activate(spec)
    model = peft.get_peft_model(models.build("llama", **ODD), peft.IA3Config(task_type="CAUSAL_LM"))
    copy.deepcopy(model)


def test_refuses_copies_of_whole_adapters():
    with pytest.raises(RankFailure, match="a copy of a model with adapters that ranks keep whole; load it a second"):
        run(copying_whole, 2, "dp_shard=2", init=False)
