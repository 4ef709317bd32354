"""What a script says of torch's checkpoint: kept where layers are checkpointed its way, refused by name where not."""

import functools
import re
from collections.abc import Callable

import pytest
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments

from hf_parallel import SpecError, parallelize
from hf_parallel.hooks.activation import deactivate
from hf_parallel.hooks.trainer.settings import check_arguments
from tests import loops, models
from tests.distributed import run, run_alone
from tests.refusals import pattern_of_refusal
from tests.training import check_numbers


def losses(spec: str | None, settings: dict | None, own: bool = False) -> list[float]:
    """Of two steps of a loop that switches checkpointing on in its own way; 3 rows of 33 tokens.

    Args:
        own: the script puts a function of its own around torch's, as LLaMA-Factory does.
    """
    model = models.build("llama").train()
    if spec:
        parallelize(model, spec)
    if settings is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if own:
        model._set_gradient_checkpointing(True, put_around(functools.partial(checkpoint, **settings)))
    return loops.losses(model, loops.rows(2, 3, 33))


def put_around(function: Callable) -> Callable:
    @functools.wraps(function, assigned=())
    def checkpoint_trained_layers(*args: object) -> object:
        return function(*args)

    return checkpoint_trained_layers


@pytest.mark.support("recomputed layers")
@pytest.mark.parametrize("spec", ["cp=2", "dp_shard=2", "pp=2", "tp=2"])
@pytest.mark.parametrize("settings", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_a_function_of_its_own(spec, settings):
    check_numbers(run(losses, 2, spec, settings, True), run_alone(losses, None, None))


def switched(spec: str | None) -> list[float]:
    """Checkpointing is switched off and on once more, as TRL does around what it generates."""
    model = models.build("llama").train()
    if spec:
        parallelize(model, spec)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    found = loops.losses(model, loops.rows(1, 3, 33))
    model.gradient_checkpointing_enable()
    return found + loops.losses(model, loops.rows(1, 3, 33))


@pytest.mark.parametrize("spec", ["tp=2,activation_checkpointing=selective", "cp=2"])
def test_switched_off_and_on(spec):
    check_numbers(run(switched, 2, spec), run_alone(switched, None))


def refuse_own_function() -> None:
    with pytest.raises(SpecError, match="selective: the script has given layers a checkpointing function of its own"):
        losses("tp=2,activation_checkpointing=selective", {"use_reentrant": False}, True)


def test_a_function_of_its_own_beside_a_policy():
    run(refuse_own_function, 2)


def outcomes(cases: list[tuple[str, dict]]) -> list[list[float] | str]:
    """Losses, or the line that refuses them."""
    found: list[list[float] | str] = []
    for spec, settings in cases:
        try:
            found.append(losses(spec, settings))
        except SpecError as error:
            found.append(str(error))
    return found


REFUSED = {
    "use_reentrant=True": {"use_reentrant": True},
    "context_fn": {"use_reentrant": False, "context_fn": lambda: None},
    "offload=True": {"offload": True},
}


def test_a_loop_is_refused_or_keeps_its_way():
    selective, every = "tp=2,activation_checkpointing=selective", "tp=2,activation_checkpointing=every:2"
    reentrant = {"use_reentrant": True}
    plain = {"use_reentrant": False, "preserve_rng_state": False}
    found = run(outcomes, 2, [(selective, reentrant), (selective, plain), (every, reentrant)])
    expected = run_alone(losses, None, None)
    for refused, *kept in found:
        assert refused.startswith(
            "gradient_checkpointing_kwargs use_reentrant=True: activation_checkpointing=selective"
        )
        check_numbers(kept, expected)


def checked(spec: str, out: str, settings: dict, on: bool) -> str | None:
    """What a Trainer's settings are answered with."""
    from hf_parallel import activate

    activate(spec)
    try:
        check_arguments(
            TrainingArguments(
                out, gradient_checkpointing=on, gradient_checkpointing_kwargs=settings, use_cpu=True, report_to=[]
            )
        )
    except SpecError as error:
        return str(error)
    finally:
        deactivate()
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_before_anything_trains(tmp_path, name):
    selective = "dp_shard=2,activation_checkpointing=selective"
    line, _ = run(checked, 2, selective, str(tmp_path), REFUSED[name], True)
    assert name in line
    assert line.endswith("works")


@pytest.mark.parametrize(("way", "on"), [("selective", False), ("every:2", True), ("full", True)])
def test_arguments_that_hold(tmp_path, way, on):
    """Not switched on, or layers that are checkpointed as the script says."""
    assert run(
        checked, 2, f"dp_shard=2,activation_checkpointing={way}", str(tmp_path), {"use_reentrant": True}, on
    ) == [
        None,
        None,
    ]


def of_layers(out: str) -> list[str | None]:
    """Answers to `every_n_layers` of a script beside the spec's choice: another one, the same, none of the spec's."""
    ways = [("full", 2), ("selective", 3), ("every:2", 3), ("every:2", 2), ("every:2", 1), ("none", 2)]
    return [checked(f"dp_shard=2,activation_checkpointing={way}", out, {"every_n_layers": n}, True) for way, n in ways]


def test_layers_are_chosen_once(tmp_path):
    full, selective, other, *accepted = run(of_layers, 2, str(tmp_path))[0]
    own, way_out = "gradient_checkpointing_kwargs every_n_layers", "activation_checkpointing=every:{} alone works"
    taken = pattern_of_refusal(f"{own}=2", "activation_checkpointing=full", works=way_out.format(2))
    assert re.search(taken, full)
    taken = pattern_of_refusal(f"{own}=3", "activation_checkpointing=selective", works=way_out.format(3))
    assert re.search(taken, selective)
    assert "activation_checkpointing=every:3 alone works" in other
    assert accepted == [None] * 3
