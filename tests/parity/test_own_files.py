"""Files that a script writes and reads by itself, `torch.save(model.state_dict())` on rank 0: as in one process."""

import os

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import AutoModelForCausalLM

from tests.distributed import run, run_alone
from tests.loops import rows, take_step
from tests.training import activate, axes, spec_id

STEPS, SAVED = 5, 3
#: Sums of fp32 terms in another order; AdamW divides small gradients by small moments, at steps of 1e-2.
CLOSE = {"rtol": 2e-5, "atol": 1e-5}


def begin(spec: str | None, folder: str, kind: str = "AdamW") -> tuple:
    """A loop with two groups of parameters, whose order is not the model's, and its part of each batch."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "norm" in name or "ln_" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "norm" not in name and "ln_" not in name]},
    ]
    made = {
        "AdamW": lambda: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
        "SGD": lambda: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
        "plain SGD": lambda: torch.optim.SGD(groups, lr=1e-1),
    }
    model, optimizer = accelerator.prepare(model, made[kind]())
    count = accelerator.num_processes
    batches = [batch[accelerator.process_index :: count] for batch in rows(STEPS, 4, 33)]
    return accelerator, model, optimizer, batches


def go_on(accelerator, model, optimizer, batches: list) -> list:
    found = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss_and_norm = take_step(accelerator, model, optimizer, loss)
        found.append([accelerator.gather(torch.tensor([loss_and_norm[0]])).mean().item(), loss_and_norm[1]])
    return found


def write(spec: str | None, folder: str, out: str, kind: str = "AdamW") -> list:
    """Five steps. After three rank 0 writes states as scripts do, alone; at the end all ranks call what writes."""
    accelerator, model, optimizer, batches = begin(spec, folder, kind)
    found = go_on(accelerator, model, optimizer, batches[:SAVED])
    inner = accelerator.unwrap_model(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(out, exist_ok=True)
        states = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": SAVED}
        torch.save(states, f"{out}/states.pt")
        half = {name: value.to(torch.bfloat16, copy=True) for name, value in inner.state_dict().items()}
        torch.save({"inside": [inner.base_model.state_dict(), {"half": half}]}, f"{out}/other.pt")
        save_model(inner, f"{out}/model.safetensors")
    accelerator.wait_for_everyone()
    accelerator.save(inner.state_dict(), f"{out}/accelerate.pt")
    torch.save(inner.state_dict(), f"{out}/all.pt")
    whole = torch.load(f"{out}/all.pt", weights_only=True)  # each rank finds it
    assert not {type(value) for value in whole.values()} - {torch.Tensor}
    found += go_on(accelerator, model, optimizer, batches[SAVED:])
    if accelerator.is_main_process:  # while the others end
        save_file({name: value.clone() for name, value in inner.state_dict().items()}, f"{out}/last.safetensors")
    accelerator.end_training()
    return found


def read(spec: str | None, folder: str, out: str, file: str, kind: str = "AdamW") -> list:
    """The last two steps, from what another run has written."""
    accelerator, model, optimizer, batches = begin(spec, folder, kind)
    states = torch.load(f"{out}/states.pt", map_location="cpu", weights_only=True)
    inner = accelerator.unwrap_model(model)
    if file == "safetensors":
        assert load_model(inner, f"{out}/model.safetensors") == (set(), [])
    else:
        assert str(inner.load_state_dict(states["model"])) == "<All keys matched successfully>"
    optimizer.load_state_dict(states["optimizer"])
    return go_on(accelerator, model, optimizer, batches[states["step"] :])


def same(found, wanted, where: str = "") -> None:
    """Compare what two files hold: types, keys, their order and values."""
    assert type(found) is type(wanted), f"{where} is {type(found)}, in one process {type(wanted)}"
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            same(found[key], value, f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}/{number}")
    elif isinstance(wanted, torch.Tensor):
        close = {"rtol": 1e-2, "atol": 1e-4} if wanted.dtype == torch.bfloat16 else CLOSE  # an ulp of bf16
        torch.testing.assert_close(found, wanted, **close, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, where


def size_of(spec: str) -> int:
    return axes(spec)["world"]


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """What one process writes and goes through, by model and optimizer."""
    made: dict = {}

    def get(name: str, kind: str = "AdamW") -> tuple[str, list]:
        if (name, kind) not in made:
            out = str(tmp_path_factory.mktemp("alone"))
            made[name, kind] = out, run_alone(write, None, runs.initial(name), out, kind)
        return made[name, kind]

    return get


def compare_files(out: str, wanted: str) -> None:
    for file in sorted(os.listdir(wanted)):
        load = load_file if file.endswith("safetensors") else torch.load
        found, expected = load(f"{out}/{file}"), load(f"{wanted}/{file}")
        if file.endswith("safetensors"):  # which sorts them
            found, expected = dict(sorted(found.items())), dict(sorted(expected.items()))
        same(found, expected, file)


WRITERS = {
    "dp_shard=2": "tp=2",
    "zero_stage=1,dp_shard=2": None,
    "dp_replicate=2": "pp=2",
    "tp=2": "dp_shard=2",
    "pp=2": None,
    "cp=2": "pp=2,tp=2",
    "pp=2,dp_shard=2": "zero_stage=2,dp_shard=2",
    "dp_shard=2,tp=2": "pp=2,dp_shard=2",
}


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])  # apart, packed and Conv1D, tied
@pytest.mark.parametrize("spec", WRITERS, ids=spec_id)
def test_written_and_read(runs, alone, tmp_path, spec, name):
    """The files are those of one process, on whatever layout; another layout goes on from them, and one process."""
    (wanted, losses), out, other = alone(name), str(tmp_path / "out"), WRITERS[spec]
    found = run(write, size_of(spec), spec, runs.initial(name), out)
    torch.testing.assert_close(found[0], losses, **CLOSE)
    compare_files(out, wanted)
    for file in ("torch", "safetensors"):
        if other is None:
            again = run_alone(read, None, runs.initial(name), out, file)
        else:
            again = run(read, size_of(other), other, runs.initial(name), out, file)[0]
        torch.testing.assert_close(again, losses[SAVED:], **CLOSE)


@pytest.mark.parametrize("kind", ["SGD", "plain SGD"])
@pytest.mark.parametrize("spec", ["pp=2", "dp_shard=2"])
def test_optimizers_with_less(runs, alone, tmp_path, spec, kind):
    (wanted, losses), out = alone("llama", kind), str(tmp_path / "out")
    run(write, 2, spec, runs.initial("llama"), out, kind)
    compare_files(out, wanted)
    for other in ("tp=2", "pp=2"):
        again = run(read, 2, other, runs.initial("llama"), wanted, "torch", kind)[0]
        torch.testing.assert_close(again, losses[SAVED:], **CLOSE)
