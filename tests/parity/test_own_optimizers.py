"""What scripts do to weights between steps: a SAM as its papers' code has it, averages that are swapped in and out."""

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Trainer

import hf_parallel
from hf_parallel.apply.weights import note_former_parameters
from hf_parallel.hooks import activation
from hf_parallel.hooks.accelerate.accelerator import follow_parameters
from tests.distributed import RankFailure, run, run_alone, run_alone_once
from tests.refusals import find_line, pattern_of_refusal
from tests.rows import Rows
from tests.training import GLOBAL_BATCH, TRAIN_SEED, axes, check_numbers, close, layouts, none, trainer_of

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}  # nothing that two ranks divide
ROWS = 3 * GLOBAL_BATCH
#: Relative; in one process, a SAM without its second pass moves the losses by 1e-3, a lost swap by 1e-2.
NEAR = 1e-5


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), as its code for torch is passed on among scripts."""

    def __init__(self, params, base, norm_of=None, rho=0.5, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base, self.norm_of = base(self.param_groups, **settings), norm_of
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        scale = self.param_groups[0]["rho"] / (self.norm() + 1e-12)
        for p in self.graded():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def back(self):
        for p in self.graded():
            p.data = self.state[p]["old_p"]

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            self.ascend()
            torch.enable_grad()(closure)()
            self.back()
        self.base.step()

    def graded(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def norm(self):
        if self.norm_of is not None:  # what the line about pp advises
            return hf_parallel.clip_grad_norm(self.norm_of, float("inf"))
        return torch.norm(torch.stack([p.grad.norm(p=2) for p in self.graded()]), p=2)


class Average:
    """An EMA whose weights are put in the place of the model's, which are kept without a copy."""

    def __init__(self, model, decay):
        self.model, self.decay, self.backup = model, decay, {}
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

    def put_in(self):
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def put_back(self):
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]


class SAMTrainer(Trainer):
    """Two passes per step, and an evaluation of the average after each."""

    def create_optimizer(self, *args):
        norm_of = self.model if pipelined(self.model) else None
        self.optimizer = SAM(self.model.parameters(), torch.optim.SGD, norm_of, lr=0.1, momentum=0.9)
        self.average, self.seen = Average(self.model, 0.5), []
        return self.optimizer

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.optimizer.ascend()
        super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.optimizer.back()
        return loss

    def evaluate(self, *args, **kwargs):
        self.average.update()
        self.average.put_in()
        self.seen.append(super().evaluate(*args, **kwargs)["eval_loss"])
        self.average.put_back()
        return {}

    def log(self, logs, *args, **kwargs):
        self.seen += [logs["loss"]] if "loss" in logs else []
        super().log(logs, *args, **kwargs)


def pipelined(model):
    state = getattr(model, "_hf_parallel", None)
    return state is not None and state.pipeline is not None


def start(spec, folder):
    if spec:
        activation.activate(spec, source="test")
    return AutoModelForCausalLM.from_pretrained(folder)


def trainer(model, folder, ranks, bf16=False):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "bf16": bf16}
    rows = Rows(ROWS, TRAIN_SEED, even=True, length=33)
    sets = {"train_dataset": rows, "eval_dataset": Rows(11, 12, length=33)}
    ours, _ = trainer_of(model, f"{folder}/out", ranks, settings, SAMTrainer, **sets)
    ours.train()
    return ours.seen


def loop(model, ranks):
    """An accelerate loop whose optimizer calls a closure; then a step by hand."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = SAM(model.parameters(), torch.optim.SGD, model if pipelined(model) else None, lr=0.1)
    rows = Rows(ROWS, TRAIN_SEED, even=True, length=33)
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // ranks)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:

        def closure(batch=batch):
            loss = model(**batch).loss
            accelerator.backward(loss)
            seen.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
    return seen


def by_hand(model, rows):
    """SGD without an optimizer, in each of the ways in which it is written."""
    seen = []
    for write in (_rebind, _add, _copy, _in_place):
        loss = model(**rows).loss
        loss.backward()
        seen.append(loss.item())
        for p in model.parameters():
            write(p, p.grad.detach())
            p.grad = None
    return seen


def _rebind(p, gradient):
    p.data = p.data - 0.1 * gradient


def _add(p, gradient):
    p.data.add_(gradient, alpha=-0.1)


def _copy(p, gradient):
    with torch.no_grad():
        p.copy_(p - 0.1 * gradient)


def _in_place(p, gradient):
    with torch.no_grad():
        p -= 0.1 * gradient


def everything(folder, spec=None):
    """All of it; the weights at the end."""
    ranks, model = axes(spec)["data_ranks"] if spec else 1, start(spec, folder)
    seen = {"loop": loop(model, ranks), "trainer": trainer(model, folder, ranks)}
    seen["by hand"] = by_hand(model, Rows(4, TRAIN_SEED, even=True, length=33)[:4])
    return seen, hf_parallel.full_state_dict(model)


@pytest.fixture(scope="module")
def initial(runs):
    """The folder of an untrained model."""
    return runs.initial("llama", **ODD)


@pytest.fixture(scope="module")
def expected(initial):
    """What one process does."""
    return run_alone(everything, initial)


SPECS = ("tp=2", "dp_shard=2", "pp=2", *(f"dp_shard=2,zero_stage={stage}" for stage in (0, 1, 2)), "tp=2,dp_shard=2")


@pytest.mark.parametrize("spec", layouts("library", *SPECS))
def test_weights_between_steps(spec, initial, expected, capfd):
    """A SAM in Accelerate and Trainer, a swapped average, SGD by hand: as in one process."""
    losses, weights = expected
    ranks = run(everything, axes(spec)["world"], initial, spec, init=False)
    for rank, (seen, _) in enumerate(ranks):
        for part in seen:
            for step, (ours, theirs) in enumerate(zip(seen[part], losses[part], strict=True)):
                none(close(f"rank {rank}, {part}: loss {step}", ours, theirs, NEAR))
    for name, ours in ranks[0][1].items():
        # absolute; fourteen steps of fp32 sums in another order, on weights that each step moves by 1e-3 and more
        assert (ours - weights[name]).abs().max() <= 2e-6, name
    assert bool(find_line(capfd.readouterr().err, "SAM", "pp_size=2")) == ("pp" in spec)


def under_autocast(folder, spec):
    """Losses of matrices as they were, without one layer's, and as they were; then steps by hand."""
    model = start(spec, folder)
    rows, found = Rows(4, TRAIN_SEED, even=True, length=33)[:4], []

    def ask(gradients=False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
            loss = model(**rows).loss
        return loss if gradients else loss.item()

    matrices = [p for p in model.parameters() if p.ndim == 2]  # what products are lowered of
    for change in (lambda p: setattr(p, "data", 0.5 * p.data), lambda p: p.data.mul_(0.5)):
        found.append(ask())
        former = [(p, p.data, p.data.clone()) for p in matrices]
        for p, _, _ in former:
            change(p)
        found.append(ask())
        with torch.no_grad():  # a change that is seen: copies are made anew
            for p in matrices:
                p.mul_(1)
        found.append(ask())
        for p, alias, values in former:
            p.data = alias
            p.data.copy_(values)
    found.append(ask())
    model.requires_grad_(False)  # a reference that is moved towards the policy, as TRL's sync_ref_model does
    found.append(ask())
    for p in matrices:
        p.data.mul_(0.5)
    found.append(ask())
    for p in matrices:
        p.data.mul_(2)
    model.requires_grad_(True)
    steps = []
    for _ in range(3):
        loss = ask(gradients=True)
        loss.backward()
        steps.append(loss.item())
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
            p.grad.zero_()
    return found, steps


@pytest.mark.parametrize("spec", layouts("library", "tp=2", "pp=2"))
def test_copies_of_another_dtype_follow(spec, initial):
    """Autocast's copies of matrices are kept for micro-batches, not beyond a change of the weights."""
    _, expected = run_alone(under_autocast, initial, None)
    for found, steps in run(under_autocast, axes(spec)["world"], initial, spec, init=False):
        before, rebound, rebound_too, again, scaled, scaled_too, after, frozen, moved = found
        assert before == again == after == frozen
        assert rebound == rebound_too == scaled == scaled_too == moved != before
        for step, (ours, theirs) in enumerate(zip(steps, expected, strict=True)):
            none(close(f"loss after {step} steps", ours, theirs, 5e-3))  # bf16; the steps move it by 5e-2 and more


class ForwardOnly(Trainer):
    """Steps by two losses and noise that is drawn again from its seed, as the code of MeZO (Malladi et al., 2023)."""

    def move(self, scale, decay=0.0):
        torch.manual_seed(self.noise)
        for _, p in self.moved:
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            if decay:
                p.data = p.data.add_(z, alpha=-scale) - decay * p.data
            else:
                p.data = scale * z + p.data

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.eval()
        self.moved = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.noise, losses = 11 + self.state.global_step, []
        for scale in (1e-2, -2e-2):
            self.move(scale)
            with torch.inference_mode():
                losses.append(self.compute_loss(model, self._prepare_inputs(inputs)))
        self.move(1e-2)
        self.move(0.02 * ((losses[0] - losses[1]) / 2e-2).item(), decay=1e-3)
        return losses[0].detach().clone()


def step_without_backward(folder, spec=None):
    """Three such steps: their losses, and the weights."""
    model = start(spec, folder)
    rows = Rows(ROWS, TRAIN_SEED, even=True, length=33)
    ours, recorder = trainer_of(
        model,
        f"{folder}/out",
        axes(spec)["data_ranks"] if spec else 1,
        {"max_steps": 3},
        ForwardOnly,
        train_dataset=rows,
    )
    ours.train()
    return [log["loss"] for log in recorder.logs if "loss" in log], hf_parallel.full_state_dict(model)


@pytest.mark.parametrize("spec", layouts("library", "tp=2", "cp=2"))
def test_steps_without_a_backward_pass(spec, initial):
    """Noise that a script draws by a weight's size is the whole weight's: each rank adds its part."""
    losses, weights = run_alone_once(step_without_backward, initial)
    ranks = run(step_without_backward, 2, initial, spec, init=False)
    assert len(losses) == 3
    for seen, _ in ranks:
        for step, (ours, theirs) in enumerate(zip(seen, losses, strict=True)):
            none(close(f"loss {step}", ours, theirs, NEAR))
    for name, ours in ranks[0][1].items():
        # absolute; a difference of two losses over 2e-2 is off by 1e-4, a step moves weights by up to 1
        assert (ours - weights[name]).abs().max() <= 1e-4, name


@pytest.mark.parametrize("spec", ["pp=2", "dp_shard=2", "dp_replicate=2,zero_stage=0"])
def test_ranks_that_would_step_apart_without_gradients_are_refused(spec, initial):
    """Stages would draw noise of their own, and data ranks go by their own losses: the first step says so."""
    words = "changes weights without a backward pass, and with (pp_size|data ranks)=2 .*tp_size and cp_size work"
    with pytest.raises(RankFailure, match=f"NotImplementedError: .*ForwardOnly {words}"):
        run(step_without_backward, 2, initial, spec, init=False)


def test_noise_that_ranks_have_drawn_apart_is_refused(initial):
    """Each rank would add its part of another tensor, and copies of a weight would differ from then on."""

    def add(spec):
        head = start(spec, initial).lm_head.weight
        torch.manual_seed(torch.distributed.get_rank())
        with pytest.raises(NotImplementedError, match="2 ranks have other numbers: .*torch.manual_seed"):
            head.data.add_(torch.randn(head.shape), alpha=0.5)
        before = hf_parallel.full_tensor(head)
        torch.manual_seed(7)
        head.data.add_(noise := torch.randn(head.shape), alpha=0.5)
        assert torch.equal(hf_parallel.full_tensor(head), before + 0.5 * noise)

    for spec in ("tp=2", "dp_shard=2"):
        run(add, 2, spec, init=False)


def test_whole_tensors_and_what_is_refused(initial):
    """A whole tensor is cut; another shape, mesh or parameter is refused by name."""

    def assign():
        model = start("tp=2,dp_shard=2", initial)
        head, norm = model.lm_head, model.model.norm
        whole = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
        head.weight.data = whole
        assert torch.equal(hf_parallel.full_tensor(head.weight), whole)
        for wrong in (whole[1:], norm.weight.data):
            shapes = tuple(wrong.shape), tuple(whole.shape)
            with pytest.raises(hf_parallel.SpecError, match=pattern_of_refusal("p.data = x", *shapes, works="shape")):
                head.weight.data = wrong
        with pytest.raises(RuntimeError):
            head.weight.data.set_(whole)
        rows = Rows(4, TRAIN_SEED, even=True, length=33)[:4]
        return model(**rows).loss.item(), hf_parallel.full_state_dict(model)

    def alone():
        model = start(None, initial)
        model.lm_head.weight.data = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        return model(**Rows(4, TRAIN_SEED, even=True, length=33)[:4]).loss.item()

    loss, _ = run(assign, 4, init=False)[0]
    none(close("loss", loss, run_alone(alone), NEAR))


def steps_of_a_former_optimizer(folder, spec, prepared):
    """Return the losses of a loop whose optimizer was made before the model became parallel."""
    if spec:
        activation.activate(spec, source="test")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = accelerator.prepare(model)
    if prepared:
        optimizer = accelerator.prepare(optimizer)
    rows, found = Rows(4, TRAIN_SEED, even=True, length=33)[:4], []
    for _ in range(2):
        loss = model(**rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_an_optimizer_of_former_parameters_is_refused(spec, initial):
    """Under dp_shard it would train nothing, under tp what no rank splits; `prepare` gives it the model's own."""
    expected = run_alone(steps_of_a_former_optimizer, initial, None, True)
    for ours in run(steps_of_a_former_optimizer, 2, initial, spec, True, init=False):
        for step, (one, other) in enumerate(zip(ours, expected, strict=True)):
            none(close(f"loss {step}", one, other, NEAR))

    def former():
        with pytest.raises(
            hf_parallel.SpecError, match=pattern_of_refusal("AdamW", works="accelerator.prepare(model, optimizer)")
        ):
            steps_of_a_former_optimizer(initial, spec, prepared=False)

    run(former, 2, init=False)


def test_names_are_read_once_per_model(monkeypatch):
    """A model of many experts has thousands of parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(7)))
    optimizer, read = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.Sequential.named_parameters
    with note_former_parameters(model):
        for layer in model:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        model[6].bias = None
    counted = []
    monkeypatch.setattr(torch.nn.Sequential, "named_parameters", lambda *a, **k: counted.append(1) or read(*a, **k))
    follow_parameters(optimizer)
    assert len(counted) == 1
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for _, p in read(model)]


class Joined(torch.optim.Optimizer):
    """Two optimizers as one, which has the states of neither, as scripts join Muon with AdamW."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self, closure=None):
        for one in self.optimizers:
            one.step()

    def state_dict(self):
        return {"all": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict):
        for one, state in zip(self.optimizers, state_dict["all"], strict=True):
            one.load_state_dict(state)


def train_with_two(folder, out, spec=None, resume=None):
    """Losses of steps with momentum for matrices and Adam for the rest, saved in the middle."""
    model = start(spec, folder)
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    adam = torch.optim.AdamW(others, lr=1e-2, eps=1e-3)
    joined = Joined([torch.optim.SGD(matrices, lr=0.1, momentum=0.9), adam])
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    ranks, rows = axes(spec)["data_ranks"] if spec else 1, Rows(ROWS, TRAIN_SEED, even=True, length=33)
    schedule = torch.optim.lr_scheduler.LambdaLR(joined, lambda step: 1 / (1 + step))
    ours, recorder = trainer_of(model, out, ranks, settings, train_dataset=rows, optimizers=(joined, schedule))
    ours.train(resume_from_checkpoint=resume)
    return [log["loss"] for log in recorder.logs]


@pytest.mark.parametrize(("spec", "other"), [("dp_shard=2", "pp=2"), ("pp=2", "tp=2")])
def test_joined_optimizers_are_saved(spec, other, initial, tmp_path):
    """Their states lie in those that are joined, and were left out of checkpoints, which could not be resumed."""
    expected = run_alone(train_with_two, initial, str(tmp_path / "alone"))
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    seen = run(train_with_two, 2, initial, first, spec, init=False)
    rest = run(train_with_two, 2, initial, second, other, f"{first}/checkpoint-2", init=False)
    check_numbers(seen, expected)
    check_numbers(rest, expected[2:])
