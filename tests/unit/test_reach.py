"""What a step reads is found by trials, on which nothing of the script's own depends."""

import pytest
import torch
from torch import nn, optim
from transformers import Adafactor

from hf_parallel.axes.data.reach import Reach, find_reaches, reads_whole_tensors
from hf_parallel.ranks.steps import skip_inner_steps, step_without_hooks
from tests import optimizers as others


def parameters(*shapes):
    """Parameters with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes or ((5, 3), (7,), (3, 5))]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        (optim.AdamW, Reach.NUMBERS),
        (optim.Adafactor, Reach.TENSORS),
        (others.Plain, Reach.NUMBERS),
        (others.Lists, Reach.NUMBERS),
        (others.LikeCopies, Reach.NUMBERS),
        (others.LikeLamb, Reach.TENSORS),
        (others.LikeApollo, Reach.TENSORS),
        (others.BeginsLate, Reach.TENSORS),
        (others.AtRightAngles, Reach.TENSORS),
        (others.CountsAmongStates, Reach.TENSORS),
        (others.LikeProdigy, Reach.ALL),
        (others.ByPlace, Reach.ALL),
        (others.Draws, Reach.RANDOM),
        (others.KeptByTensor, Reach.UNKNOWN),
        (others.ByPlaceApart, Reach.APART),
        (others.Around, Reach.UNKNOWN),
        (optim.LBFGS, Reach.UNKNOWN),
    ],
)
def test_what_is_found(kind, reach):
    """A trial changes neither the parameters nor the optimizer nor the random numbers that follow."""
    optimizer, state = kind(own := parameters(), lr=0.1), torch.get_rng_state()
    before = [parameter.clone() for parameter in own], str(optimizer.state_dict())
    assert find_reaches(optimizer) == [reach]
    assert all(map(torch.equal, before[0], own))
    assert before[1] == str(optimizer.state_dict())
    assert torch.equal(state, torch.get_rng_state())


def test_a_class_that_holds_gradients_is_not_tried():
    """Its steps change them, whatever parameters the copy of a trial has."""
    own = parameters()
    before = [parameter.grad.clone() for parameter in own]

    class Doubles(optim.SGD):
        def step(self, closure=None):
            for parameter in own:
                parameter.grad.mul_(2)
            return super().step(closure)

    assert find_reaches(Doubles(own, lr=0.1)) == [Reach.UNKNOWN]
    assert all(torch.equal(parameter.grad, former) for parameter, former in zip(own, before, strict=True))


@pytest.mark.parametrize("rate", [0.0, 1e4])
def test_rates_at_which_nothing_would_move_or_all_would_diverge(rate):
    """A warm-up begins at zero."""
    optimizer = others.LikeLamb(parameters(), lr=rate)
    assert find_reaches(optimizer) == [Reach.TENSORS]
    assert find_reaches(others.Plain(parameters(), lr=rate)) == [Reach.NUMBERS]
    assert optimizer.param_groups[0]["lr"] == rate


def test_groups_differ():
    """An option may switch the kind of step; a group that is added later is tried, too."""

    class Either(others.Plain):
        def find_moves(self, group, chosen):
            return [p.grad / p.grad.norm() if group["norms"] else p.grad for p in chosen]

    first, second, third = parameters()
    optimizer = Either([{"params": [first], "norms": False}, {"params": [second], "norms": True}], lr=0.1)
    assert find_reaches(optimizer) == [Reach.NUMBERS, Reach.TENSORS]
    optimizer.add_param_group({"params": [third], "norms": True})
    assert find_reaches(optimizer) == [Reach.NUMBERS, Reach.TENSORS, Reach.TENSORS]


def test_frozen_parameters_among_others():
    """They have no states, of which the trial would take its own."""
    frozen, *others_own = parameters()
    frozen.requires_grad_(False)
    assert find_reaches(others.LikeApollo([frozen, *others_own], lr=0.1)) == [Reach.TENSORS]


def test_wrapped_by_a_schedule_of_rates():
    """Which counts the steps of the script, not those of a trial."""
    optimizer = others.LikeLamb(parameters(), lr=0.1)
    optim.lr_scheduler.LinearLR(optimizer)
    assert reads_whole_tensors(optimizer)
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    assert optimizer._opt_called


def test_known_ones_are_not_tried():
    """Neither torch's nor transformers' own."""
    optimizer = Adafactor(parameters(), lr=None)
    optimizer.param_groups[0]["of the script"] = object()
    assert find_reaches(optimizer) == [Reach.TENSORS]


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, others.NormalisedSGD, others.SignedSGD])
def test_a_step_within_a_step_calls_no_hook(kind):
    optim.SGD([torch.zeros(1, requires_grad=True)])  # from here on torch calls the hooks in SGD's own step, too
    weight = torch.ones(3, requires_grad=True)
    optimizer, heard = kind([weight], lr=0.1), []
    optimizer.register_step_pre_hook(skip_inner_steps(lambda *_: heard.append("before")))
    optimizer.register_step_post_hook(skip_inner_steps(lambda *_: heard.append("after")))
    weight.grad = torch.ones(3)
    optimizer.step()
    assert heard == ["before", "after"]
    former = weight.detach().clone()
    step_without_hooks(optimizer)
    assert heard == ["before", "after"]
    assert (weight < former).all()
