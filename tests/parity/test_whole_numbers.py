"""One number of a weight, a gradient or a moment, as callbacks log it: of the whole tensor on every rank, or an error.

Sizes are odd: 515 rows of vocabulary, 3 layers, one key/value head, rows of 33 tokens.
"""

import contextlib
import io

import pytest
import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from tests.distributed import run, run_alone_once
from tests.loops import rows, take_step
from tests.training import activate, axes, check_alone, close, layouts, none

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}
#: Relative; parts of a sum are off by a tenth and more. Sums in fp32 over other parts, means of numbers that cancel.
NEAR = 1e-4

#: What callbacks write, of a list of tensors.
NUMBERS = {
    "squares": lambda tensors: sum((t.detach() ** 2).sum().item() for t in tensors),
    "squares with a gradient": lambda tensors: sum(float(t.pow(2).sum()) for t in tensors),
    "sum of numbers": lambda tensors: float(sum(t.detach().pow(2).sum() for t in tensors)),
    "sum from zero": lambda tensors: sum((t.detach().square().sum() for t in tensors), torch.zeros(())).item(),
    "norms": lambda tensors: sum(t.norm().item() ** 2 for t in tensors),
    "torch.norm": lambda tensors: sum(torch.norm(t).item() ** 2 for t in tensors),
    "vector_norm": lambda tensors: sum(torch.linalg.vector_norm(t.detach(), 3).item() for t in tensors),
    "stacked norms": lambda tensors: torch.stack([t.detach().norm() for t in tensors]).norm().item(),
    "largest": lambda tensors: max(t.abs().max().item() for t in tensors),
    "smallest": lambda tensors: min(t.detach().amin().item() for t in tensors),
    "means of squares": lambda tensors: sum(t.detach().square().mean().item() for t in tensors),
    "deviations": lambda tensors: sum(t.std().item() for t in tensors),
    "positive": lambda tensors: sum((t > 0).sum().item() for t in tensors),
    "not zero": lambda tensors: sum(int(torch.count_nonzero(t.detach())) for t in tensors),
    "finite": lambda tensors: sum(bool(torch.isfinite(t).all()) for t in tensors),
    "above": lambda tensors: sum(1 for t in tensors if t.detach().abs().sum() > 30),
    "of columns": lambda tensors: sum(t.detach().sum(0).abs().max().item() for t in tensors),
    "largest of columns": lambda tensors: sum(t.detach().max(dim=0).values.sum().item() for t in tensors),
    "difference": lambda tensors: sum(
        torch.nn.functional.mse_loss(t.detach(), 0.5 * t.detach()).item() for t in tensors
    ),
    "text": lambda tensors: sum(float(f"{t.detach().square().sum():.9f}") for t in tensors),
    "array": lambda tensors: float(sum(t.detach().square().sum().cpu().numpy() for t in tensors)),
    "kurtosis": lambda tensors: sum(((t - t.mean()) / (t.std() + 1e-3)).pow(4).mean().item() for t in tensors),
}


@pytest.fixture(scope="module")
def initial(runs):
    """The folder of an untrained model."""
    return runs.initial("llama", **ODD)


def start(folder, spec):
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer):
    tokens = torch.randint(0, 515, (4, 33), generator=torch.Generator().manual_seed(3))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def log(folder, spec=None):
    """All numbers after a step, of weights, gradients and second moments."""
    model, optimizer = start(folder, spec)
    step(model, optimizer)
    weights = list(model.parameters())
    moments = [optimizer.state[p]["exp_avg_sq"].sqrt() for p in weights]
    kinds = {"weights": weights, "gradients": [p.grad for p in weights], "moments": moments}
    return {(kind, name): ask(tensors) for kind, tensors in kinds.items() for name, ask in NUMBERS.items()}


@pytest.mark.parametrize("spec", layouts("library", "dp_shard=2", "tp=2", "tp=2,dp_shard=2"))
def test_numbers_are_of_whole_tensors(spec, initial):
    """Every rank reads what one process reads."""
    expected = run_alone_once(log, initial)
    for found in run(log, axes(spec)["world"], initial, spec, init=False):
        none([line for key in expected for line in close(str(key), found[key], expected[key], NEAR)])


def look(folder, spec):
    """What is said of a loop that trains, freezes and clips, and of one that sums over all parameters."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, optimizer = start(folder, spec)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        step(model, optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
    with contextlib.redirect_stderr(io.StringIO()) as said_later:
        sums = [sum(p.detach().square().sum().item() for p in model.model.parameters()) for _ in range(2)]
    return "has those of one stage" in said.getvalue(), said_later.getvalue(), sums


def test_a_sum_over_the_parameters_of_one_stage_is_told(initial):
    """Once, with the script's line, and not where a library goes through them."""
    (early, line, _), (_, other, _) = run(look, 2, initial, "pp=2", init=False)
    assert not early
    assert line.count("test_whole_numbers.py:") == 1
    assert "pp_size=2" in line
    assert "clip_grad_norm" in line
    assert not other


def clip_double(spec, folder):
    """Norms and losses of three clipped steps of fp64 weights."""
    activate(spec)
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    batch, found = rows(4, 33).to(accelerator.device), []
    for _ in range(3):
        # transformers' own loss takes the logits in fp32
        loss = torch.nn.functional.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())
        found += take_step(accelerator, model, optimizer, loss)
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_norms_of_double_precision(spec, initial):
    """Single precision inside of the norm moved all clipped steps by 1e-8."""
    check_alone(clip_double, spec, initial, tolerance=1e-13, init=False)
