"""Files that a script writes and reads by itself, `torch.save(model.state_dict())` on rank 0: as in one process."""

import contextlib
import io
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
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
    optimizer, count = made[kind](), accelerator.num_processes
    length = 2 * STEPS * count  # accelerate steps a schedule once per data rank
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batches = [batch[accelerator.process_index :: count] for batch in rows(STEPS, 4, 33)]
    return accelerator, model, optimizer, scheduler, batches


def go_on(accelerator, model, optimizer, scheduler, batches: list) -> list:
    found = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss_and_norm = take_step(accelerator, model, optimizer, loss)
        scheduler.step()
        found.append([accelerator.gather(torch.tensor([loss_and_norm[0]])).mean().item(), loss_and_norm[1]])
    return found


def write(spec: str | None, folder: str, out: str, kind: str = "AdamW") -> list:
    """Five steps. After three rank 0 writes states as scripts do, alone; at the end all ranks call what writes."""
    accelerator, model, optimizer, scheduler, batches = begin(spec, folder, kind)
    inner = accelerator.unwrap_model(model)
    for module in inner.modules():
        if type(module).__name__.endswith("MLP"):  # what is saved in the midst of a call leaves gathered weights alone
            module.register_forward_hook(lambda module, args, output: torch.save({"of": output}, io.BytesIO()))
            module.register_forward_hook(lambda module, args, output: bool(pickle.dumps(output.detach())) and None)
    found = go_on(accelerator, model, optimizer, scheduler, batches[:SAVED])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(out, exist_ok=True)
        states = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": SAVED}
        torch.save({**states, "scheduler": scheduler.state_dict()}, f"{out}/states.pt")
        half = {name: value.to(torch.bfloat16, copy=True) for name, value in inner.state_dict().items()}
        torch.save({"inside": [inner.base_model.state_dict(), {"half": half}]}, f"{out}/other.pt")
        save_model(inner, f"{out}/model.safetensors")
        save_file(unalias(accelerator.get_state_dict(model)), f"{out}/state_dict.safetensors")
    accelerator.wait_for_everyone()
    accelerator.save(inner.state_dict(), f"{out}/accelerate.pt")
    torch.save(inner.state_dict(), f"{out}/all.pt")
    whole = torch.load(f"{out}/all.pt", weights_only=True)  # each rank finds it
    assert not {type(value) for value in whole.values()} - {torch.Tensor}
    found += go_on(accelerator, model, optimizer, scheduler, batches[SAVED:-1])
    if accelerator.is_main_process:  # while the others come to their next step
        torch.save({"model": inner.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/amid.pt")
    found += go_on(accelerator, model, optimizer, scheduler, batches[-1:])
    if accelerator.is_main_process:  # while the others end
        save_file(unalias(inner.state_dict()), f"{out}/last.safetensors")
    accelerator.end_training()
    return found


def unalias(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def read(spec: str | None, folder: str, out: str, file: str, kind: str = "AdamW") -> list:
    """The last two steps, from what another run has written."""
    accelerator, model, optimizer, scheduler, batches = begin(spec, folder, kind)
    states = torch.load(f"{out}/states.pt", map_location="cpu", weights_only=True)
    inner = accelerator.unwrap_model(model)
    if file == "safetensors":
        assert load_model(inner, f"{out}/model.safetensors") == (set(), [])
    else:
        assert str(inner.load_state_dict(states["model"])) == "<All keys matched successfully>"
    optimizer.load_state_dict(states["optimizer"])
    scheduler.load_state_dict(states["scheduler"])
    return go_on(accelerator, model, optimizer, scheduler, batches[states["step"] :])


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
        assert found == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), where


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
    found = run(write, axes(spec)["world"], spec, runs.initial(name), out)
    torch.testing.assert_close(found[0], losses, **CLOSE)
    compare_files(out, wanted)
    for file in ("torch", "safetensors"):
        if other is None:
            again = run_alone(read, None, runs.initial(name), out, file)
        else:
            again = run(read, axes(other)["world"], other, runs.initial(name), out, file)[0]
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


class Network(nn.Module):
    """A model of another library: it has a `save_pretrained` that names its file as it likes, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(515, 33), nn.Linear(33, 33), nn.Linear(33, 515, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.embed(tokens))))

    def save_pretrained(self, folder):
        os.makedirs(folder, exist_ok=True)
        save_model(self, f"{folder}/network.safetensors")


def train_network(spec: str | None, out: str) -> dict:
    """A loop over a plain module: rank 0 saves it, samples from it, and all ranks save and load the loop's state."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    network = Network()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2, eps=1e-4))
    count, found = accelerator.num_processes, []

    def step(batch):
        mine = batch[accelerator.process_index :: count]
        loss = nn.functional.cross_entropy(network(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.gather(loss.detach()[None]).mean().item()

    batches = rows(4, 4, 33)
    found += [step(batch) for batch in batches[:2]]
    inner = accelerator.unwrap_model(network)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        inner.save_pretrained(out)
        with torch.no_grad():
            found.append(inner(batches[0]).double().norm().item())
        torch.save({"network": inner.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/network.pt")
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{out}/state")
    found += [step(batch) for batch in batches[2:]]
    accelerator.load_state(f"{out}/state")
    again = [step(batch) for batch in batches[2:]]
    accelerator.end_training()
    return {"found": found, "again": again}


@pytest.mark.parametrize("spec", ["dp_shard=2", "zero_stage=1,dp_shard=2", "dp_replicate=2"])
def test_plain_module(tmp_path, spec):
    wanted = run_alone(train_network, None, str(tmp_path / "one"))
    first = run(train_network, 2, spec, str(tmp_path / "several"))[0]
    torch.testing.assert_close(first["found"], wanted["found"], **CLOSE)
    torch.testing.assert_close(first["again"], wanted["found"][3:], **CLOSE)
    for file in ("network.safetensors", "state/model.safetensors"):
        same(*(load_file(tmp_path / where / file) for where in ("several", "one")), file)
    same(*(torch.load(tmp_path / where / "network.pt") for where in ("several", "one")))


def write_less(spec: str, folder: str, out: str) -> dict[str, str]:
    """What is said or raised where a file cannot be that of one process."""
    accelerator, model, optimizer, scheduler, batches = begin(spec, folder)
    go_on(accelerator, model, optimizer, scheduler, batches[:1])
    inner, rank = accelerator.unwrap_model(model), dist.get_rank()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            torch.save(inner.state_dict(), f"{out}/{rank}.pt")
    found = {"each": said.getvalue()}
    tries = {
        "model": lambda: torch.save(inner, f"{out}/model.pt"),
        "some": lambda: torch.save({n: p for n, p in inner.state_dict().items() if "mlp" in n}, f"{out}/some.pt"),
    }
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = ""
        except Exception as error:
            found[name] = str(error)
    accelerator.end_training()
    return found


@pytest.mark.parametrize("spec", ["pp=2", "dp_shard=2"])
def test_files_that_hold_less(runs, tmp_path, spec):
    first, second = run(write_less, 2, spec, runs.initial("llama"), str(tmp_path))
    assert first["each"].count("a part of the weights") == 1
    assert first["model"] == second["model"]
    assert "torch.save of a model" in first["model"]
    if "pp" in spec:
        assert "pp_size=2" in first["some"]
        assert "full_state_dict" in first["some"]
    else:
        assert first["some"] == ""
        some = torch.load(tmp_path / "some.pt")
        assert {tuple(value.shape) for value in some.values()} == {(64, 128), (128, 64)}


def load_to_device(spec, file):
    """Load where Accelerator computes, which torch's files know by its name."""
    activate(spec)
    device = Accelerator(cpu=True).device
    return str(device), torch.load(file, map_location=device)["weight"]


def test_files_are_loaded_to_the_device_of_accelerate(tmp_path):
    """accelerate calls a CPU among several processes "cpu:0", to which torch.load finds no way."""
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "weight.pt")
    for place, weight in run(load_to_device, 2, "tp=2", str(tmp_path / "weight.pt"), init=False):
        assert (place, weight.tolist()) == ("cpu", [0, 1, 2])
