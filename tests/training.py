"""The unchanged Trainer script as a function, and the comparison of what it does with what one process does.

`train` is what a user writes. A rank of a parallel run calls `activate` before it, and its batch size per device is
the global one divided by the data ranks; nothing else differs from the reference, which runs in one plain process.

Scripts of another kind are functions `script(spec, out, …)` that give an `Outcome`: `activate(spec)`, a model, then
`fit(*trainer_of(model, out, data_ranks, …))`, with arguments for all that differs. `Runs.compare` runs them on ranks
and in one process. All comparisons and their tolerances are here; one of its own has its reason beside it.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.hooks import activation
from tests import models
from tests.distributed import run, run_alone, run_alone_once
from tests.rows import Rows, data, pad

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


#: No matrix product is cut: only the order of the last sum differs.
DATA_PARALLEL = Tolerance(loss=1e-6, grad_norm=1e-6)
#: bf16 keeps 8 bits: 4e-3 per product, and layouts round at other places.
BF16 = Tolerance(2e-2, 2e-2, 2e-2, 5e-1, 1e-2)
#: Relative, of numbers that are compared one by one: as `Tolerance.loss`, and under fp16, whose 11 bits keep 5e-4.
SUMS, FP16 = Tolerance.loss, 3e-3


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
    """What one run did, on one rank or in one process; what its script does not do is None."""

    logs: list[dict[str, float]]
    gradient_keys: list[list[str]]
    folder: str | None = None  # with what it saved
    eval_loss: float | None = None
    predictions: torch.Tensor | None = None
    label_ids: torch.Tensor | None = None
    more: Any = None  # for the test itself: it is not compared


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


def arguments_of(
    out: str, data_ranks: int = 1, kind: type[TrainingArguments] = TrainingArguments, **changes: Any
) -> Any:
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
    return kind(out, **{**given, **changes})


def make_trainer(
    spec: str,
    out: str,
    kind: type[Trainer],
    changes: dict[str, Any],
    options: dict[str, Any],
    check_late: Callable[[Trainer], object] | None = None,
) -> None:
    """Run a script until its trainer is made. `check_late` sees fp16, which CPUs refuse earlier under any layout."""
    activate(spec)
    arguments = arguments_of(out)
    for name, value in changes.items():
        setattr(arguments, name, value)
    trainer = kind(model=models.build("llama"), args=arguments, train_dataset=Rows(8, 3), **options)
    if check_late is not None:
        trainer.args.fp16 = True
        check_late(trainer)


def follow_trainer_refusal(said: str, spec: str, changes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the spec and the Trainer's arguments as the end of a refusal suggests: `…; bf16=True works`."""
    found = re.search(r"; (\w+)=(\S+) works", said)
    assert found, said
    name, value = found.groups()
    if name in {field.name for field in dataclasses.fields(ParallelConfig)}:
        settings = [setting for setting in spec.split(",") if not setting.startswith(f"{name}=")]
        return ",".join([*settings, f"{name}={value}"]), changes
    return spec, {**changes, name: {"True": True, "False": False}.get(value, value)}


def trainer_of(
    model: Any,
    out: str,
    data_ranks: int = 1,
    settings: TrainingArguments | dict[str, Any] | None = None,
    kind: type[Trainer] = Trainer,
    recorder: Recorder | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    **options: Any,
) -> tuple[Trainer, Any]:
    """The trainer of a script, which prints nothing, and what records it.

    Args:
        settings: arguments of training as they are, or what differs from those of `arguments_of`.
        kind: the class of the trainer, such as one with its own `compute_loss`.
        options: what else the trainer is given: data sets, a collator, a loss function.
    """
    recorder = recorder or Recorder()
    ready = isinstance(settings, TrainingArguments)
    arguments = settings if ready else arguments_of(out, data_ranks, **(settings or {}))
    trainer = kind(model=model, args=arguments, callbacks=[recorder, *callbacks], **options)
    trainer.remove_callback(PrinterCallback)
    return trainer, recorder


def fit(trainer: Trainer, recorder: Recorder, folder: str | None = None, predicts: bool = False) -> Outcome:
    """Train, evaluate if the trainer has rows for it, predict those if asked, and save if there is a folder."""
    trainer.train()
    outcome = Outcome(recorder.logs, recorder.gradient_keys, folder)
    if trainer.eval_dataset is not None:
        outcome.eval_loss = trainer.evaluate()["eval_loss"]
    if predicts:
        predicted = trainer.predict(trainer.eval_dataset)
        outcome.predictions, outcome.label_ids = as_one(predicted.predictions), torch.as_tensor(predicted.label_ids)
    if folder is not None:
        trainer.save_model(folder)
    return outcome


def train(script: Script, initial: str, out: str, data_ranks: int = 1, rank: int = 0, model: Any = None) -> Outcome:
    """Train, evaluate, predict and save, as a user's script does; `model` stands for the one that it would load."""
    changes = {
        "gradient_accumulation_steps": script.accumulation,
        **({"max_steps": 3} if script.stream else {}),
        **{key: dict(value) if isinstance(value, tuple) else value for key, value in script.arguments},
    }
    arguments = arguments_of(out, data_ranks, **changes)
    kind = {key: getattr(script, key) for key in ("stream", "uneven_lengths", "length", "masked")}
    options = {
        "train_dataset": data(script.model, script.rows, TRAIN_SEED, **kind),
        "eval_dataset": data(script.model, script.eval_rows, EVAL_SEED, **kind),
        "data_collator": pad if script.uneven_lengths else None,
        "compute_loss_func": own_loss if script.own_loss else None,
    }
    model = load_model(script, initial, rank) if model is None else model
    made = trainer_of(model, out, settings=arguments, kind=OwnTrainer if script.overrides else Trainer, **options)
    outcome = fit(*made, f"{out}/saved", predicts=True)
    if script.uneven_lengths:
        outcome.predictions[outcome.label_ids == -100] = 0  # what stands at padding depends on who padded
    return outcome


def as_one(predictions: Any) -> torch.Tensor:
    """The tensor of a model that predicts one; several, such as T5's logits and encoder states, side by side."""
    if not isinstance(predictions, tuple):
        return torch.as_tensor(predictions)
    return torch.cat([torch.as_tensor(part).flatten(1) for part in predictions], 1)


def train_rank(spec: str, script: Script, initial: str, out: str) -> Outcome:
    """`train` on one rank of a parallel run."""
    return train(script, initial, out, activate(spec), int(os.environ["RANK"]))


def activate(spec: str | None) -> int:
    """Make this process a rank of the layout, or leave it the one plain process that it is; returns the data ranks."""
    if spec:
        activation.activate(spec, source="test")
    return axes(spec)["data_ranks"]


def axes(spec: str | None) -> dict[str, int]:
    """World size and data ranks of a spec in short keys, by plain multiplication (not the product's own parser)."""
    sizes = dict(re.findall(r"(\w+)=(\d+)", spec or ""))
    size = {axis: int(sizes.get(axis, 1)) for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    data_ranks = size["dp_replicate"] * size["dp_shard"]
    return {"world": data_ranks * size["pp"] * size["cp"] * size["tp"], "data_ranks": data_ranks}


def over(row: str, *specs: str, **others: Iterable[Any]) -> Callable:
    """Parametrise a test over layouts, each a cell in this row of the support matrix, and over what else is named.

    The row may hold parameters, such as "{model}"; what is named comes before the layout in the names of cases.
    """

    def decorated(test: Callable) -> Callable:
        for name, values in others.items():
            test = pytest.mark.parametrize(name, list(values))(test)
        return pytest.mark.support(row)(pytest.mark.parametrize("spec", specs)(test))

    return decorated


def pairs(specs: dict[str, str]) -> list[tuple[str, str]]:
    """Parameters of tests whose cases run on layouts of their own: each case with each of its specs in one string."""
    return [(case, spec) for case, several in specs.items() for spec in several.split()]


def layouts(row: str, *specs: str) -> list:
    """Parameters for `spec`, for a test of which not all cases are of one row."""
    return [pytest.param(spec, marks=pytest.mark.support(row)) for spec in specs]


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

    def initial(self, model: str, **changes: Any) -> str:
        """Folder of the untrained model, in Hub format; `changes` are of its config."""
        name = "-".join([model, *(f"{key}{value}" for key, value in changes.items())])
        if name not in self.made:
            folder = str(self.root / name)
            run_alone(lambda: models.build(model, **changes).save_pretrained(folder))
            self.made[name] = folder
        return self.made[name]

    def reference(self, script: Script) -> Outcome:
        """What one plain process does with the script."""
        if script not in self.made:
            self.made[script] = run_alone(train, script, self.initial(script.model), self._folder())
        return self.made[script]

    def parallel(self, script: Script, spec: str) -> list[Outcome]:
        """What each rank of the layout does with the script."""
        call = partial(train_rank, spec, script, self.initial(script.model), self._folder())
        return run(call, axes(spec)["world"], init=False)

    def compare(self, script: Callable, spec: str, *args: Any, tolerance: Tolerance | None = None) -> list[Outcome]:
        """Fail unless `script(spec, out, *args)` does on all ranks what it does in one process, where spec is None.

        Returns what each rank did. In one process it runs once per session with the same arguments.
        """
        reference = self.alone(script, *args)
        ranks = run(partial(script, spec, self._folder(), *args), axes(spec)["world"], init=False)
        none(differences(ranks, reference, tolerance or Tolerance()))
        return ranks

    def alone(self, script: Callable, *args: Any) -> Outcome:
        """What `script(None, out, *args)` does in one process."""
        key = script, args
        if key not in self.made:
            self.made[key] = run_alone(script, None, self._folder(), *args)
        return self.made[key]

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
    found += key_differences([rank.gradient_keys for rank in ranks], reference.gradient_keys)
    if reference.folder is None:
        return found
    return found + weight_differences(ranks[0].folder, reference.folder, tolerance.weights)


def check_plainly_loaded(folder: str) -> None:
    """Fail unless plain transformers reads the folder, no key missing and none too many, and writes the same again."""
    info = run_alone(_loaded_and_saved, folder, f"{folder}-again")
    assert info == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    none(weight_differences(f"{folder}-again", folder, 0.0))


def _loaded_and_saved(folder: str, again: str) -> dict[str, list]:
    config = AutoConfig.from_pretrained(folder)
    model, info = models.auto_class(config).from_pretrained(folder, output_loading_info=True)
    model.save_pretrained(again)
    return {key: sorted(info[key]) for key in info if key != "conversion_errors"}


def key_differences(ranks: list[list[list[str]]], reference: list[list[str]]) -> list[str]:
    """Compare, step by step, the gradients that any of the ranks has with those of the reference."""
    found = []
    for step, expected in enumerate(reference):
        present = set().union(*(keys[step] for keys in ranks if step < len(keys)))
        found += _keys(f"gradients in step {step + 1}", present, set(expected))
    return found


def weight_differences(folder: str, reference: str, tolerance: float) -> list[str]:
    """Compare two saved folders: the same tensors by name, dtype and shape, within an absolute tolerance."""
    return tensor_differences("weight", weights(folder), weights(reference), tolerance)


def tensor_differences(
    what: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    """Compare tensors by name, dtype and shape, within an absolute tolerance."""
    found = _keys(f"{what}s", set(ours), set(theirs))
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{what} {name}: {a.dtype} {tuple(a.shape)}, one process {b.dtype} {tuple(b.shape)}")
        elif not (gap := (a.double() - b.double()).abs().max().item()) <= tolerance:
            found.append(f"{what} {name}: off by {gap:.2e}")
    return found


def _numbers(outcome: Outcome, reference: Outcome, tolerance: Tolerance) -> list[str]:
    if len(outcome.logs) != len(reference.logs):
        return [f"{len(outcome.logs)} steps logged, one process {len(reference.logs)}"]
    found = []
    for step, (ours, theirs) in enumerate(zip(outcome.logs, reference.logs, strict=True)):
        for key in ("loss", "grad_norm"):
            found += close(f"{key} in step {step + 1}", ours[key], theirs[key], getattr(tolerance, key))
    if reference.eval_loss is not None:
        found += close("eval_loss", outcome.eval_loss, reference.eval_loss, tolerance.eval_loss)
    return found if reference.predictions is None else found + _predictions(outcome, reference, tolerance)


def _predictions(outcome: Outcome, reference: Outcome, tolerance: Tolerance) -> list[str]:
    if outcome.predictions.shape != reference.predictions.shape:
        return [f"predictions {tuple(outcome.predictions.shape)}, not {tuple(reference.predictions.shape)}"]
    found = []
    if not torch.equal(outcome.label_ids, reference.label_ids):
        found.append("predicted rows are not the data set's rows in order")
    gap = (outcome.predictions - reference.predictions).abs().max().item()
    return found if gap <= tolerance.predictions else [*found, f"predictions off by {gap:.2e}"]


def check_numbers(ranks: list[list[float]], reference: list[float], tolerance: float = SUMS) -> None:
    """Fail unless every rank has the numbers of one process, one by one."""
    every = enumerate(ranks)
    none([f"rank {rank}: {line}" for rank, ours in every for line in number_differences(ours, reference, tolerance)])


def check_alone(fn: Callable, spec: str, *args: Any, tolerance: float = SUMS, init: bool = True) -> None:
    """Fail unless `fn(spec, *args)` gives every rank the numbers of one process, where spec is None."""
    ranks = run(fn, axes(spec)["world"], spec, *args, init=init)
    check_numbers(ranks, run_alone_once(fn, None, *args), tolerance)


def number_differences(ours: list[float], theirs: list[float], tolerance: float = SUMS) -> list[str]:
    """Compare two lists of numbers, each within a relative tolerance."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} numbers, one process {len(theirs)}"]
    pairs = enumerate(zip(ours, theirs, strict=True), 1)
    return [line for place, pair in pairs for line in close(f"number {place}", *pair, tolerance)]


def close(what: str, ours: float, theirs: float, tolerance: float) -> list[str]:
    """One line if two numbers are not within a relative tolerance (NaN never is), else nothing."""
    if math.isfinite(ours) and abs(ours - theirs) <= tolerance * abs(theirs):
        return []
    gap = abs(ours - theirs) / (abs(theirs) or math.nan)
    return [f"{what}: {ours!r}, one process {theirs!r} (relative {gap:.1e})"]


def _keys(what: str, ours: set[str], theirs: set[str]) -> list[str]:
    if ours == theirs:
        return []
    return [
        f"{what}: {len(ours)} of {len(theirs)}; missing {sorted(theirs - ours)[:3]}, extra {sorted(ours - theirs)[:3]}"
    ]
