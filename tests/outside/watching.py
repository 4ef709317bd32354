"""Run a script as `python -m hf_parallel` runs it, in this process, and note what it did without its knowledge.

Trainer's callbacks tell of losses, norms, metrics and gradients. In a loop of its own a script's calls of Accelerator
do: losses at `backward`, norms at `clip_grad_norm_`, rows at `gather_for_metrics`, metrics at `log`.
"""

import contextlib
import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
from torch.utils._pytree import tree_leaves
from transformers import DataCollatorForLanguageModeling, PrinterCallback, trainer

from hf_parallel import __main__ as runner
from tests.training import Recorder, close, compared, weight_differences

SCRIPTS = Path(__file__).parent / "scripts"
#: Of what depends on time, or on the number of processes by its meaning.
NOT_COMPARED = ("runtime", "per_second", "total_flos", "step_time", "memory/", "preparation_time")


@dataclass(frozen=True)
class Tolerance:
    """How far a layout may be from one process."""

    losses: float = 1e-5  # relative; sums of fp32 terms in another order, and weights that differ by as much
    norms: float = 1e-4  # relative; a norm adds up what the weights of several steps differ by
    logits: float = 1e-4  # absolute, on logits of size ~10
    weights: float = 2e-5  # absolute; Adam divides the rounding of a gradient by its size
    rewards: float = 2e-6  # absolute; a difference of sums of log-probabilities, which are of size ~100


@dataclass
class Seen:
    """What one run did, on one rank or in one process."""

    data_rank: int = 0
    logs: list[dict[str, float]] = field(default_factory=list)
    gradient_keys: list[list[str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gathered: list[torch.Tensor] = field(default_factory=list)
    folder: str = ""


class Trained(Recorder):
    """Keeps every log of a trainer, metrics included, and which parameters have gradients."""

    def __init__(self, seen: Seen):
        self.seen, self.logs, self.gradient_keys, self.training = seen, seen.logs, seen.gradient_keys, False

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.logs.append(numbers(compared(logs)))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        inner = getattr(model, "model_body", model)  # setfit's is no module
        super().on_pre_optimizer_step(args, state, control, model=inner, **kwargs)

    def on_train_begin(self, *args, **kwargs):
        self.training = True  # from here on Accelerator is the trainer's tool


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The numbers in a log."""
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float, torch.Tensor))}


def run_script(name: str, arguments: list[str], root: str, out: str, spec: str | None = None) -> Seen:
    """What `python -m hf_parallel --parallel SPEC NAME …` does, or `python NAME …` without a spec."""
    os.makedirs(out, exist_ok=True)
    os.chdir(out)
    datasets.config.HF_DATASETS_CACHE = Path(root, "cache")
    datasets.disable_progress_bars()
    seen = Seen(folder=out)
    command = runner.Command(spec, False, str(SCRIPTS / name), arguments)
    if spec is not None:
        runner.prepare(command)
        from hf_parallel.hooks import runtime

        seen.data_rank = runtime.mesh().data_rank
    watch(seen)
    draw_masks_by_row()
    with contextlib.redirect_stdout(None if os.environ.get("OUTSIDE_SHOWN") else open(os.devnull, "w")):
        runner.run(command)
    return seen


def watch(seen: Seen) -> None:
    """Put the observers in place, in a process that ends with its script."""
    trained = Trained(seen)
    trainer.DEFAULT_CALLBACKS = [trained, *trainer.DEFAULT_CALLBACKS]  # a script takes no callbacks
    PrinterCallback.on_log = lambda *args, **kwargs: None
    kind = accelerate.Accelerator

    def noting(name, note):
        original = getattr(kind, name)

        @functools.wraps(original)
        def call(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if not trained.training:
                note(self, result, *args)
            return result

        setattr(kind, name, call)

    noting("backward", lambda self, result, loss: seen.losses.append(float(loss.detach())))
    noting("clip_grad_norm_", lambda self, result, *args: seen.norms.append(float(result)))
    noting("log", lambda self, result, values, *args: seen.logs.append(numbers(values)))
    noting("gather_for_metrics", lambda self, result, *args: seen.gathered.extend(tensors(result)))
    ending = kind.end_training
    kind.end_training = lambda self: (save_models(self, seen.folder), ending(self))[1]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of what was gathered."""
    return [torch.as_tensor(part).detach().clone() for part in tree_leaves(value)]


def save_models(accelerator: accelerate.Accelerator, out: str) -> None:
    """Many examples end without saving: their weights are compared all the same."""
    for index, model in enumerate(accelerator._models):
        accelerator.unwrap_model(model).save_pretrained(
            f"{out}/end-{index}", is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )


def draw_masks_by_row() -> None:
    """A masking collator draws for its batch: two ranks with half of it would draw other masks. Here rows draw."""
    original = DataCollatorForLanguageModeling.torch_mask_tokens

    def by_row(self, inputs, special_tokens_mask=None, *args, **kwargs):
        rows = []
        for index in range(len(inputs)):
            special = None if special_tokens_mask is None else special_tokens_mask[index : index + 1]
            kept = int((inputs[index] != self.tokenizer.pad_token_id).sum())  # padding depends on the batch
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(inputs[index, :kept].sum()))
                part = slice(index, index + 1), slice(0, kept)
                ids, labels = original(self, inputs[part].clone(), None if special is None else special[:, :kept])
            filler = inputs[index : index + 1, kept:]
            rows.append((torch.cat([ids, filler], 1), torch.cat([labels, torch.full_like(filler, -100)], 1)))
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    DataCollatorForLanguageModeling.torch_mask_tokens = by_row


def differences(ranks: list[Seen], reference: Seen, tolerance: Tolerance) -> list[str]:
    """Every difference from one process, in words."""
    found = []
    for rank, seen in enumerate(ranks):
        where = f"rank {rank}: "
        logs = _mean_logs(ranks) if reference.losses else seen.logs  # a loop of its own logs what its process knows
        found += [where + text for text in _logs(logs, reference.logs, tolerance, rank == 0)]
        found += [where + text for text in _series("norm", seen.norms, reference.norms, tolerance.norms)]
        found += [where + text for text in _rows(seen.gathered, reference.gathered, tolerance.logits)]
    found += _series("loss", _means(ranks), reference.losses, tolerance.losses)
    for step, expected in enumerate(reference.gradient_keys):
        present = set().union(*(seen.gradient_keys[step] for seen in ranks if step < len(seen.gradient_keys)))
        found += [] if present == set(expected) else [f"step {step + 1}: gradients of {sorted(present)[:3]}…"]
    return found + _files(ranks[0].folder, reference.folder, tolerance)


def _means(ranks: list[Seen]) -> list[float]:
    """A data rank's loss is that of its own rows: what one process has is the mean."""
    of_data_ranks = {seen.data_rank: seen.losses for seen in ranks}
    return [sum(losses) / len(losses) for losses in zip(*of_data_ranks.values(), strict=True)]


def _mean_logs(ranks: list[Seen]) -> list[dict[str, float]]:
    of_data_ranks = {seen.data_rank: seen.logs for seen in ranks}
    pairs = zip(*of_data_ranks.values(), strict=True)
    return [{key: sum(log[key] for log in logs) / len(logs) for key in logs[0]} for logs in pairs]


def _logs(ours: list[dict], theirs: list[dict], tolerance: Tolerance, alone: bool) -> list[str]:
    """Of metrics that a script logs in its main process alone, other ranks have the losses only."""
    if not alone and len(ours) < len(theirs):
        ours, theirs = ([log for log in logs if "loss" in log] for logs in (ours, theirs))
    if len(ours) != len(theirs):
        return [f"{len(ours)} logs, one process {len(theirs)}"]
    found = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found += _values(f"in log {index}", a, b, tolerance)
    return found


def _values(where: str, ours: dict, theirs: dict, tolerance: Tolerance) -> list[str]:
    if (names := _compared(theirs)) != _compared(ours):
        return [f"{sorted(_compared(ours) ^ names)} {where} of one run only"]
    bounds = {name: tolerance.norms if "norm" in name else tolerance.losses for name in names}
    return [
        text
        for name in sorted(names)
        if "rewards/" not in name or abs(ours[name] - theirs[name]) > tolerance.rewards
        for text in _close(f"{name} {where}", ours[name], theirs[name], bounds[name])
    ]


def _compared(log: dict) -> set[str]:
    return {key for key in log if not any(part in key for part in NOT_COMPARED)}


def _close(what: str, ours: float, theirs: float, tolerance: float) -> list[str]:
    return [] if ours == theirs else close(what, ours, theirs, tolerance)


def _series(what: str, ours: list[float], theirs: list[float], tolerance: float) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{len(ours)} of {what}, one process {len(theirs)}"]
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [text for index, (a, b) in pairs for text in _close(f"{what} {index}", a, b, tolerance)]


def _rows(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> list[str]:
    """What was gathered. Means per process differ while their mean does not, but of a ragged last batch."""
    if len(ours) != len(theirs):
        return [f"gathered {len(ours)} times, one process {len(theirs)}"]
    found = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.ndim == b.ndim == 2 and len(a) == len(b) and not a.is_floating_point():  # texts with padding
            a, b = (each[:, : min(a.shape[1], b.shape[1])] if _is_padded(each, a, b) else each for each in (a, b))
        if a.ndim == 1 and a.is_floating_point():
            if a.shape == b.shape or index < len(ours) - 1:
                found += _close(f"mean gathered at {index}", a.mean().item(), b.mean().item(), 1e-5)
        elif a.shape != b.shape:
            found.append(f"gathered {tuple(a.shape)} at {index}, one process {tuple(b.shape)}")
        elif not torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance if a.is_floating_point() else 0):
            found.append(f"gathered at {index}: off by {(a.double() - b.double()).abs().max():.1e}")
    return found


def _is_padded(texts: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether what only one of `a` and `b` has of `texts` is one number, which fills them."""
    return len(texts[:, min(a.shape[1], b.shape[1]) :].unique()) <= 1


def _files(ours: str, theirs: str, tolerance: Tolerance) -> list[str]:
    """Saved weights folder by folder, metrics and texts that the script wrote."""
    found = []
    for file in sorted(Path(theirs).rglob("*.safetensors")):
        folder = file.parent.relative_to(theirs)
        found += [
            f"{folder}: {text}" for text in weight_differences(f"{ours}/{folder}", str(file.parent), tolerance.weights)
        ]
    for file in sorted(Path(theirs).glob("*.txt")):
        if Path(ours, file.name).read_text() != file.read_text():
            found.append(
                f"{file.name}: {Path(ours, file.name).read_text()[:200]!r}, one process {file.read_text()[:200]!r}"
            )
    if (results := Path(theirs, "all_results.json")).exists():
        a, b = (numbers(json.loads(path.read_text())) for path in (Path(ours, results.name), results))
        found += _values("in all_results.json", a, b, tolerance)
    return found
