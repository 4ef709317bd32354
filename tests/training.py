"""The unchanged Trainer script as a function, and the comparison of what it does with what one process does.

`train` is what a user writes. A rank of a parallel run calls `activate` before it, and its batch size per device is
the global one divided by the data ranks; nothing else differs from the reference, which runs in one plain process.
"""

import math
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tests import models
from tests.distributed import run, run_alone
from tests.rows import data, pad

GLOBAL_BATCH = 8
TRAIN_SEED, EVAL_SEED = 11, 12


@dataclass(frozen=True)
class Script:
    """One training script: its model, its data and its own arguments. Sizes are rows; batches are global."""

    model: str = "llama"
    accumulation: int = 1
    rows: int = 22  # three steps of 8, 8 and 6 rows: the last batch is ragged
    eval_rows: int = (
        13  # no number of data ranks divides it; with four of them the last batch leaves one without a row
    )
    stream: bool = False
    route: str = "from_pretrained"  # or "from_config", or "unequal": from_config under a seed per rank
    uneven_lengths: bool = False
    length: int | None = None  # of a row; None is the data set's own
    masked: bool = True  # rows come with an attention mask
    own_loss: bool = False
    overrides: bool = False  # a Trainer subclass whose compute_loss reads the logits
    arguments: tuple[tuple[str, Any], ...] = ()
    lora: tuple[tuple[str, Any], ...] = ()  # of a LoraConfig; adapters are added to the loaded model
    second_adapter: bool = False  # another one, which is the one that trains

    def with_accumulation(self, steps: int) -> "Script":
        """The same script with `steps` micro-batches per step and still three steps; the very last one is ragged."""
        rows = 22 * steps
        return Script(**{**vars(self), "accumulation": steps, "rows": rows})


@dataclass(frozen=True)
class Tolerance:
    """How far a layout may be from one process; the defaults are for fp32."""

    loss: float = 1e-5  # relative; sums of ~1e4 fp32 terms in another order differ by a few 1e-7, ten times over
    grad_norm: float = 1e-5  # relative; apart from the loss, which a wrong gradient sync leaves intact
    eval_loss: float = 1e-5  # relative; one row counted twice among 13 moves it by 1e-2
    predictions: float = 1e-4  # absolute, on logits of size ~10, after three steps on weights 1e-6 apart
    weights: float = 1e-6  # absolute; three SGD steps move the largest entry of every tensor by 1e-3 or more


DATA_PARALLEL = Tolerance(
    loss=1e-6, grad_norm=1e-6
)  # no matrix product is cut: only the order of the last sum differs
BF16 = Tolerance(
    2e-2, 2e-2, 2e-2, 5e-1, 1e-2
)  # bf16 keeps 8 bits: 4e-3 per product, and layouts round at other places


def compared(logs: dict[str, Any]) -> dict[str, Any]:
    """What one process logs too: not the speed, the waits and the memory of a layout."""
    return {key: value for key, value in logs.items() if not key.startswith("perf/")}


class Recorder(TrainerCallback):
    """Keeps what Trainer logs, and which parameters have a gradient just before each optimizer step."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.gradient_keys: list[list[str]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append({"loss": logs["loss"], "grad_norm": logs["grad_norm"]})

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient_keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))


@dataclass
class Outcome:
    """What one run did, on one rank or in one process."""

    logs: list[dict[str, float]]
    gradient_keys: list[list[str]]
    eval_loss: float
    predictions: torch.Tensor
    label_ids: torch.Tensor
    folder: str


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """A user's `compute_loss_func`: next-token cross entropy plus a pull of the logits towards zero."""
    logits, targets = outputs["logits"][:, :-1].float(), labels[:, 1:]
    kept = targets != -100
    loss = torch.nn.functional.cross_entropy(logits[kept], targets[kept], reduction="sum")
    loss = loss + 0.01 * logits[kept].pow(2).mean(-1).sum()
    return loss / (kept.sum() if num_items_in_batch is None else num_items_in_batch)


class OwnTrainer(Trainer):
    """A user's subclass: gives labels to the model and computes its own loss from the logits all the same."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = own_loss(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def load_model(script: Script, folder: str, rank: int):
    """The script's model by its route; `rank` only matters to the route with unequal seeds."""
    config = AutoConfig.from_pretrained(folder)
    if script.route == "from_pretrained":
        model = models.auto_class(config).from_pretrained(folder)
        return with_adapters(script, model) if script.lora else model
    torch.manual_seed(models.SEED + (rank if script.route == "unequal" else 0))
    return models.auto_class(config).from_config(config)


def with_adapters(script: Script, model):
    """What a user's LoRA script does after loading: new adapters, or those of a folder."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(models.SEED)
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in script.lora}
    settings = {key: dict(value) if key.endswith("_pattern") else value for key, value in settings.items()}
    if "folder" in settings:
        return PeftModel.from_pretrained(model, settings["folder"], is_trainable=True)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    if script.second_adapter:
        model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", **settings))
        model.set_adapter("second")
    return model


def arguments_of(out: str, data_ranks: int = 1, **changes: Any) -> TrainingArguments:
    """What scripts here start from: an epoch of plain SGD over `GLOBAL_BATCH` rows per step, on CPUs, without a word.

    Args:
        changes: what a script has in another way.
    """
    given = {
        "per_device_train_batch_size": GLOBAL_BATCH // data_ranks,
        "per_device_eval_batch_size": GLOBAL_BATCH // data_ranks,
        **{"num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "seed": 0},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True},
    }
    return TrainingArguments(out, **{**given, **changes})


def train(script: Script, initial: str, out: str, data_ranks: int = 1, rank: int = 0) -> Outcome:
    """Train, evaluate, predict and save, as a user's script does."""
    chosen = {
        "gradient_accumulation_steps": script.accumulation,
        **({"max_steps": 3} if script.stream else {}),
        **{key: dict(value) if isinstance(value, tuple) else value for key, value in script.arguments},
    }
    arguments = arguments_of(out, data_ranks, **chosen)
    recorder, kind = (
        Recorder(),
        {key: getattr(script, key) for key in ("stream", "uneven_lengths", "length", "masked")},
    )
    trainer_class = OwnTrainer if script.overrides else Trainer
    trainer = trainer_class(
        model=load_model(script, initial, rank),
        args=arguments,
        train_dataset=data(script.model, script.rows, TRAIN_SEED, **kind),
        eval_dataset=data(script.model, script.eval_rows, EVAL_SEED, **kind),
        data_collator=pad if script.uneven_lengths else None,
        compute_loss_func=own_loss if script.own_loss else None,
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    eval_loss = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    folder = f"{out}/saved"
    trainer.save_model(folder)
    predictions, label_ids = as_one(predicted.predictions), torch.as_tensor(predicted.label_ids)
    if script.uneven_lengths:
        predictions[label_ids == -100] = 0  # what stands at padding depends on who padded
    return Outcome(recorder.logs, recorder.gradient_keys, eval_loss, predictions, label_ids, folder)


def as_one(predictions: Any) -> torch.Tensor:
    """The tensor of a model that predicts one; several, such as T5's logits and encoder states, side by side."""
    if not isinstance(predictions, tuple):
        return torch.as_tensor(predictions)
    return torch.cat([torch.as_tensor(part).flatten(1) for part in predictions], 1)


def train_rank(spec: str, script: Script, initial: str, out: str) -> Outcome:
    """`train` on one rank of a parallel run."""
    from hf_parallel import hooks

    hooks.activate(spec, source="test")
    return train(script, initial, out, axes(spec)["data_ranks"], int(os.environ["RANK"]))


def axes(spec: str) -> dict[str, int]:
    """World size and data ranks of a spec in short keys, by plain multiplication (not the product's own parser)."""
    sizes = dict(re.findall(r"(\w+)=(\d+)", spec))
    size = {axis: int(sizes.get(axis, 1)) for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    data_ranks = size["dp_replicate"] * size["dp_shard"]
    return {"world": data_ranks * size["pp"] * size["cp"] * size["tp"], "data_ranks": data_ranks}


def layouts(column: str, *specs: str) -> list:
    """Parameters for `spec`, each marked with its cell of the support matrix and with an id that `-k` can select."""
    return [pytest.param(spec, marks=pytest.mark.support(spec, column), id=spec_id(spec)) for spec in specs]


def spec_id(spec: str) -> str:
    """`tp=2,pp=2` -> `tp2_pp2`."""
    return spec.replace("=", "").replace(",", "_")


def weights(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a saved folder, read without transformers."""
    files = [*sorted(Path(folder).glob("*.safetensors")), *sorted(Path(folder).glob("second/*.safetensors"))]
    tensors = [prefixed(file.parent.name, load_file(file)) for file in files]
    merged = {name: tensor for part in tensors for name, tensor in part.items()}
    if len(merged) != sum(map(len, tensors)):
        raise AssertionError(f"a tensor is in more than one file of {folder}")
    return merged


def prefixed(folder: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two adapters have the same names in folders of their own."""
    return {f"second.{name}": tensor for name, tensor in tensors.items()} if folder == "second" else tensors


class Runs:
    """Runs scripts under a folder of their own; initial models and references are made once per session."""

    def __init__(self, root: Path):
        self.root = root
        self.made: dict[Any, Any] = {}

    def _folder(self) -> str:
        self.made["folders"] = self.made.get("folders", 0) + 1
        return str(self.root / f"run-{self.made['folders']}")

    def initial(self, model: str) -> str:
        """Folder of the untrained model, in Hub format."""
        if model not in self.made:
            folder = str(self.root / model)
            run_alone(lambda: models.build(model).save_pretrained(folder))
            self.made[model] = folder
        return self.made[model]

    def reference(self, script: Script) -> Outcome:
        """What one plain process does with the script."""
        if script not in self.made:
            self.made[script] = run_alone(train, script, self.initial(script.model), self._folder())
        return self.made[script]

    def parallel(self, script: Script, spec: str) -> list[Outcome]:
        """What each rank of the layout does with the script."""
        call = partial(train_rank, spec, script, self.initial(script.model), self._folder())
        return run(call, axes(spec)["world"], init=False, timeout=90)

    def check(self, script: Script, spec: str, tolerance: Tolerance | None = None) -> None:
        """Fail, with every difference in words, unless the layout does what one process does."""
        if tolerance is None:
            tolerance = Tolerance() if any(f"{axis}=" in spec for axis in ("tp", "pp", "cp")) else DATA_PARALLEL
        none(differences(self.parallel(script, spec), self.reference(script), tolerance))


def none(found: list[str], shown: int = 20) -> None:
    """Fail with the first differences; pytest itself would show one of them."""
    more = f"\n... and {len(found) - shown} more" if len(found) > shown else ""
    assert not found, "not as in one process:\n" + "\n".join(found[:shown]) + more


def differences(ranks: list[Outcome], reference: Outcome, tolerance: Tolerance) -> list[str]:
    """Compare all ranks with the reference: numbers, keys of gradients and weights, order and count of rows."""
    found = []
    for rank, outcome in enumerate(ranks):
        found += [f"rank {rank}: {text}" for text in _numbers(outcome, reference, tolerance)]
    for step, expected in enumerate(reference.gradient_keys):
        present = set().union(*(rank.gradient_keys[step] for rank in ranks if step < len(rank.gradient_keys)))
        found += _keys(f"gradients in step {step + 1}", present, set(expected))
    return found + weight_differences(ranks[0].folder, reference.folder, tolerance.weights)


def weight_differences(folder: str, reference: str, tolerance: float) -> list[str]:
    """Compare two saved folders: the same tensors by name, dtype and shape, within an absolute tolerance."""
    ours, theirs = weights(folder), weights(reference)
    found = _keys("saved tensors", set(ours), set(theirs))
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"weight {name}: {a.dtype} {tuple(a.shape)}, one process {b.dtype} {tuple(b.shape)}")
        elif not (gap := (a.double() - b.double()).abs().max().item()) <= tolerance:
            found.append(f"weight {name}: off by {gap:.2e}")
    return found


def _numbers(outcome: Outcome, reference: Outcome, tolerance: Tolerance) -> list[str]:
    if len(outcome.logs) != len(reference.logs):
        return [f"{len(outcome.logs)} steps logged, one process {len(reference.logs)}"]
    found = []
    for step, (ours, theirs) in enumerate(zip(outcome.logs, reference.logs, strict=True)):
        for key in ("loss", "grad_norm"):
            found += close(f"{key} in step {step + 1}", ours[key], theirs[key], getattr(tolerance, key))
    found += close("eval_loss", outcome.eval_loss, reference.eval_loss, tolerance.eval_loss)
    if outcome.predictions.shape != reference.predictions.shape:
        return [*found, f"predictions {tuple(outcome.predictions.shape)}, not {tuple(reference.predictions.shape)}"]
    if not torch.equal(outcome.label_ids, reference.label_ids):
        found.append("predicted rows are not the data set's rows in order")
    gap = (outcome.predictions - reference.predictions).abs().max().item()
    return found if gap <= tolerance.predictions else [*found, f"predictions off by {gap:.2e}"]


def close(what: str, ours: float, theirs: float, tolerance: float) -> list[str]:
    """One line if two numbers are not within a relative tolerance (NaN never is), else nothing."""
    if math.isfinite(ours) and abs(ours - theirs) <= tolerance * abs(theirs):
        return []
    return [f"{what}: {ours!r}, one process {theirs!r} (relative {abs(ours - theirs) / abs(theirs):.1e})"]


def _keys(what: str, ours: set[str], theirs: set[str]) -> list[str]:
    if ours == theirs:
        return []
    return [
        f"{what}: {len(ours)} of {len(theirs)}; missing {sorted(theirs - ours)[:3]}, extra {sorted(ours - theirs)[:3]}"
    ]
