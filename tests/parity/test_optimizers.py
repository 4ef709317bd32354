"""Every optimizer of torch that treats numbers by themselves, in each of its implementations, on parallel models.

foreach is what CUDA takes by default; a tensor-parallel model has DTensors beside plain norms, which it does not mix.
"""

import pytest
import torch
from accelerate import Accelerator
from torch import nn, optim
from torch.distributed.tensor import DTensor
from transformers import Adafactor

from hf_parallel.axes.data.reach import find_reaches
from tests import models
from tests import optimizers as others
from tests.distributed import RankFailure, run, run_alone, run_alone_once
from tests.rows import Rows
from tests.training import SUMS, activate, axes, check_numbers, over, trainer_of

#: A vocabulary that no number of ranks divides; the epsilons keep rounding of tiny gradients out of quotients.
SHAPE = {"num_hidden_layers": 1, "vocab_size": 515}


CASES = {
    "SGD foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SGD fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": False}),
    "AdamW foreach": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "foreach": True, "amsgrad": True}),
    "AdamW fused": (optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    "Adagrad foreach": (optim.Adagrad, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    "Adadelta foreach": (optim.Adadelta, {"lr": 1.0, "eps": 1e-3, "foreach": True}),
    "Adamax foreach": (optim.Adamax, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    "ASGD foreach": (optim.ASGD, {"lr": 0.1, "foreach": True}),
    "NAdam foreach": (optim.NAdam, {"lr": 0.01, "eps": 1e-3, "foreach": True}),
    "RAdam foreach": (optim.RAdam, {"lr": 0.1, "eps": 1e-3, "foreach": True}),
    "RMSprop foreach": (optim.RMSprop, {"lr": 0.01, "eps": 1e-2, "foreach": True}),
    "another's": (others.Lists, {"lr": 0.1}),
    "another's kernels": (others.LikeCopies, {"lr": 0.05}),
}


def muon(params, **settings):
    """Which takes matrices alone; what else there is stays as it is."""
    return optim.Muon([p for p in params if p.ndim == 2], **settings)


#: They read rows, columns or norms; the last one of all parameters.
WHOLE = {
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
    "transformers' Adafactor": (Adafactor, {}),
    "with momentum": (Adafactor, {"lr": 0.01, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}),
    "Muon": (muon, {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}),
    "norms": (others.LikeLamb, {"lr": 0.05}),
    "projections": (others.LikeApollo, {"lr": 0.05}),
    "a common rate": (others.LikeProdigy, {"lr": 0.02}),
}
STEPS, BATCH = 3, 4


def losses(spec: str | None, whole: bool = False, tied: bool = False) -> dict[str, list[float]]:
    """By case, the losses of a loop whose optimizer has taken 0, 1, … steps."""
    import hf_parallel

    batches = [Rows(STEPS * BATCH, 11, even=True, length=33)[slice(i * BATCH, (i + 1) * BATCH)] for i in range(STEPS)]
    found = {}
    for name, (kind, settings) in (WHOLE if whole else CASES).items():
        model = models.build("llama", **SHAPE, tie_word_embeddings=tied)
        if spec is not None:
            hf_parallel.parallelize(model, spec)
        optimizer, seen = kind(model.parameters(), **settings), []

        @torch.enable_grad()  # which transformers' Adafactor leaves off
        def closure(model=model, optimizer=optimizer, seen=seen):
            optimizer.zero_grad()
            loss = model(**batches[len(seen)]).loss
            loss.backward()
            seen.append(loss.item())
            return loss

        for step in range(STEPS):
            if step % 2:  # both ways to step
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)
        check_states(optimizer, model)
        found[name] = seen
    return found


def check_states(optimizer, model):
    """After a step everything is of the model's own parameters, as checkpoints expect."""
    assert optimizer.param_groups[0].get("foreach") == optimizer.defaults.get("foreach")
    own = set(map(id, model.parameters()))
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters() if p.ndim > 1} <= given <= own
    assert set(map(id, optimizer.state)) == given
    for parameter, slots in optimizer.state.items():
        for slot in (value for value in slots.values() if torch.is_tensor(value) and value.ndim):
            if slot.shape != parameter.shape:  # of rows or columns
                assert not isinstance(slot, DTensor)
                continue
            assert isinstance(slot, DTensor) == isinstance(parameter, DTensor)
            assert getattr(slot, "placements", None) == getattr(parameter, "placements", None)


@pytest.fixture(scope="module")
def expected():
    """What one process does."""
    return run_alone(losses, None)


@over("library", "tp=2", "tp=2,dp_shard=2")
def test_steps_as_in_one_process(spec, expected):
    """All ranks have the same rows, so the mean over data ranks is that of one."""
    ranks = run(losses, axes(spec)["world"], spec)
    for name, theirs in expected.items():  # the steps move the loss by 1e-2 and more
        check_numbers([found[name] for found in ranks], theirs)


@over("library", "dp_shard=2", "tp=2", "tp=2,dp_shard=2", "dp_replicate=2")
@pytest.mark.parametrize("tied", [False, True])
def test_steps_on_whole_tensors(spec, tied):
    """Means of rows and columns, and an orthogonal factor, are those of the whole; Muon's products are in bf16."""
    ranks = run(losses, axes(spec)["world"], spec, True, tied)
    for name, theirs in run_alone_once(losses, None, True, tied).items():
        assert abs(theirs[-1] - theirs[0]) > 0.01, name
        tolerance = 1e-4 if name == "Muon" else SUMS  # its products are in bf16
        check_numbers([found[name] for found in ranks], theirs, tolerance)


def test_ranks_without_a_row_and_optimizers_that_need_all():
    """One row of two data ranks: the second rank's part is empty. And a step that fails leaves nothing behind."""

    def steps():
        import hf_parallel

        torch.manual_seed(0)
        model = hf_parallel.parallelize(nn.Linear(5, 1), "dp_shard=2")
        optimizers = [kind(model.parameters(), **settings) for kind, settings in CASES.values()]
        model(torch.ones(3, 5)).sum().backward()
        for optimizer in optimizers:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            optimizer.step()
            check_states(optimizer, model)
        with pytest.raises(hf_parallel.SpecError, match="whole tensors.*AdamW works"):
            optim.LBFGS(model.parameters(), lr=0.1).step(lambda: 0.0)
        return model.weight.full_tensor()

    def alone():
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        optimizers = [kind(model.parameters(), **settings) for kind, settings in CASES.values()]
        model(torch.ones(3, 5)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return model.weight.detach()

    for weight in run(steps, 2):
        torch.testing.assert_close(weight, run_alone(alone), rtol=1e-6, atol=0)  # the same operations


class Fails(others.LikeLamb):
    """A step raises at one shape."""

    fails = False

    def find_moves(self, group, chosen):
        if group["plain"]:
            self.state.update({p: {"seen": True} for p in chosen})
            return [p.grad for p in chosen]
        if self.fails and chosen[0].shape == (19, 5):
            raise ZeroDivisionError
        return super().find_moves(group, chosen)


class FailsTogether(others.LikeProdigy):
    """A step raises, of all parameters."""

    fails = False

    def find_moves(self, group, chosen):
        if self.fails:
            raise ZeroDivisionError
        return super().find_moves(group, chosen)


@pytest.mark.parametrize("kind", [Fails, FailsTogether])
def test_a_step_on_whole_tensors_that_fails(kind):
    """The next one finds groups and states; of steps one by one, those before the failure stay."""

    def steps(spec):
        import hf_parallel

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 19), nn.Linear(19, 3))
        if spec is not None:
            hf_parallel.parallelize(model, spec)
        biases = [p for p in model.parameters() if p.ndim == 1]  # a group that is stepped on in parts
        matrices = [p for p in model.parameters() if p.ndim == 2]
        groups = [{"params": matrices, "plain": False}, {"params": biases, "plain": True}]
        optimizer = kind(groups, lr=0.1)
        for step in range(3):
            model(torch.ones(3, 5)).sum().backward()
            if step == 1:
                optimizer.fails = True
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                optimizer.fails = False
                assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
            optimizer.step()
        if spec is None:
            return model[0].weight.detach()
        check_states(optimizer, model)
        return model[0].weight.full_tensor()

    tolerance = 1e-6 if kind is FailsTogether else 0.1
    for weight in run(steps, 2, "dp_shard=2"):
        torch.testing.assert_close(weight, run_alone(steps, None), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (others.LikeProdigy, "several tensors"),
        (others.ByPlaceApart, "several tensors"),
        (others.Draws, "random numbers"),
        (others.LikeApollo, "place"),
        (optim.LBFGS, "directions"),
        (others.Around, None),
        (others.LikeLamb, None),
    ],
)
def test_under_pp_what_reads_several_parameters(kind, why):
    """Each stage would go by its own."""

    def step():
        import hf_parallel

        model = hf_parallel.parallelize(models.build("llama", **SHAPE | {"num_hidden_layers": 2}), "pp=2")
        rows = Rows(BATCH, 11, even=True, length=33)[slice(0, BATCH)]
        model(**rows).loss.backward()
        kind(model.parameters(), lr=0.1).step()

    if why is None:
        run(step, 2)
        return
    with pytest.raises(RankFailure, match=f"{kind.__name__} under pp=2.*{why}.*adamw_torch works"):
        run(step, 2)


def loop_with_states_before(spec, taken=False):
    """Losses of a loop whose Adagrad, with sums from the start, is made before the model is parallel."""
    activate(spec)
    model = models.build("llama", **SHAPE | {"num_hidden_layers": 2})
    optimizer = optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    rows = Rows(BATCH, 11, even=True, length=33)[:BATCH]
    if taken:
        for sums in optimizer.state.values():
            sums["sum"].flatten()[1:] += 1.0
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    seen = []
    for _ in range(STEPS):
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@over("library", "pp=2", "dp_shard=2", "tp=2")
def test_states_from_before_the_first_step(spec):
    """They are moved to the parameters of the parallel model; what steps have written is not."""
    check_numbers(run(loop_with_states_before, 2, spec, init=False), run_alone_once(loop_with_states_before, None))
    with pytest.raises(RankFailure, match="took steps before"):
        run(loop_with_states_before, 2, spec, True, init=False)


@over("library", "dp_shard=2", "tp=2,dp_shard=2")
@pytest.mark.parametrize("hooked", [False, True])
def test_steps_that_call_the_step_of_torch(spec, hooked):
    """Whose hooks torch calls, too, once the process has made an optimizer of that class."""

    def train(spec):
        import hf_parallel

        if hooked:
            optim.SGD([torch.zeros(1, requires_grad=True)])
        found = {}
        for kind in (others.NormalisedSGD, others.SignedSGD):
            model = models.build("llama", **SHAPE)
            if spec is not None:
                hf_parallel.parallelize(model, spec)
            optimizer = kind(model.parameters(), lr=0.01, momentum=0.5)
            for step in range(STEPS):
                loss = model(
                    **Rows(STEPS * BATCH, 11, even=True, length=33)[slice(step * BATCH, (step + 1) * BATCH)]
                ).loss
                loss.backward()
                found.setdefault(kind.__name__, []).append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found[kind.__name__].append([reach.name for reach in find_reaches(optimizer)] if spec else [])
        return found

    expected, ranks = run_alone(train, None), run(train, axes(spec)["world"], spec)
    for kind, reach in (("NormalisedSGD", "TENSORS"), ("SignedSGD", "NUMBERS")):
        assert [ours[kind].pop() for ours in ranks] == [[reach]] * len(ranks)
        check_numbers([ours[kind] for ours in ranks], expected[kind][:-1])


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({"save_steps": 3}, True), ({"save_steps": 3, "save_only_model": True}, False), ({"save_strategy": "no"}, False)],
)
def test_states_that_no_checkpoint_holds_are_refused_before_the_first_is_due(tmp_path, settings, refused):
    def train():
        activate("dp_shard=2")
        model = models.build("llama", **SHAPE)
        made = others.LikeGalore(model.parameters(), lr=0.01), None
        changes = {"save_strategy": "steps", "max_steps": 3, **settings}
        trainer, _ = trainer_of(model, str(tmp_path), 2, changes, train_dataset=Rows(24, 11), optimizers=made)
        try:
            trainer.train()
        except NotImplementedError as error:
            return trainer.state.global_step, str(error)
        return trainer.state.global_step, None

    for steps, said in run(train, 2):
        assert steps == (1 if refused else 3)
        assert (said is None) != refused
        assert said is None or "keeps projector as object" in said and "save_only_model=True" in said
