"""Loops of Accelerate: how they accumulate, clip, schedule, evaluate, resume and save, all at once.

Compared are each step's loss, norm and learning rate, evaluations, the set of gradients, and the saved folder.
"""

import contextlib
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import AutoConfig, get_scheduler

from tests import models, training
from tests.drawn.bench import RESUMES_ON, Choices, Kind, summarise
from tests.drawn.trainers import ADAPTED, DECODERS, KINDS_OF_LAYERS, OTHERS, WAYS, freeze
from tests.rows import VOCABULARY, Rows, data, pad
from tests.training import EVAL_SEED, TRAIN_SEED, activate, with_adapters

CHOICES: dict[str, tuple] = {
    **{name: WAYS[name] for name in ("model", "rows", "eval_rows", "batch", "frozen", "lora", "dtype", "config")},
    "data": ("rows", "stream"),
    "uneven_lengths": (False, True),
    "even": (True, False),  # as many targets in each row
    "shuffle": (False, True),
    "drop_last": (False, True),
    "workers": (0, 1),
    "epochs": (1, 2),
    "accumulates": ("no", "accumulate", "by_hand", "no_sync", "sync_each_batch"),
    "steps_of_accumulation": (2, 3),
    "loss": ("model", "mean", "sum_over_tokens", "two_calls", "no_labels"),
    "backward": ("accelerator", "loss"),
    "clip": ("no", "norm", "small_norm", "infinite", "value", "torch_norm", "when_synchronised"),
    "optimizer": ("sgd", "momentum", "adamw", "groups", "adafactor", "closure"),
    "made": ("before_prepare", "after_prepare", "own_prepare"),
    "schedule": ("no", "linear", "cosine", "prepared_linear", "plateau"),
    "zero_grad": ("optimizer", "model", "kept"),
    "checkpointing": (False, True),
    "mixed_precision": ("no", "bf16"),
    "split_batches": (False, True),
    "dispatch_batches": (None, True, False),
    "use_seedable_sampler": (False, True),
    "evaluates": ("at_end", "each_epoch", "each_step", "in_training_mode"),
    "metric": ("gathered_loss", "gathered_for_metrics", "reduced", "gathered_objects", "padded"),
    "average": ("no", "ema_by_hand", "averaged_model"),
    "state": ("no", "saved", "loaded_back", "custom"),
    "resumes": (False, True),
    "resumes_on": RESUMES_ON,
    "saves": ("unwrapped", "state_dict", "model_itself", "accelerator"),
    "generates": (False, True),
    "reads": ("nothing", "norm_of_weights", "parameters", "hidden_states"),
}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script makes together, or whose mean over data ranks is known to be another one."""
    plain: set[str] = set()
    if chosen["model"] not in DECODERS and chosen["model"] in OTHERS:
        plain |= {"uneven_lengths", "loss", "lora", "data", "generates", "config", "frozen", "reads"}
    if chosen["model"] not in ADAPTED:
        plain |= {"lora"}
        if chosen["optimizer"] == "adafactor":  # biases of keys have no gradient but rounding, which it makes a step
            plain |= {"optimizer"}
    if chosen["model"] in KINDS_OF_LAYERS and "num_hidden_layers" in dict(chosen["config"]):
        plain |= {"config"}
    if chosen["data"] == "stream":
        plain |= {"shuffle", "uneven_lengths", "use_seedable_sampler", "resumes"}
    if chosen["accumulates"] == "no":
        plain |= {"steps_of_accumulation"}
    if chosen["accumulates"] != "no":
        chosen |= {"drop_last": True, "rows": 24}  # loops divide by the same number in a shorter last step
    if chosen["optimizer"] in ("closure", "adafactor"):
        plain |= {"schedule", "accumulates"}
    if chosen["resumes"]:
        plain |= {"state", "average", "shuffle", "accumulates"}
        chosen |= {"epochs": 2, "rows": 31}
        if chosen["schedule"] != "no":
            chosen |= {"schedule": "prepared_linear"}  # the others are in no checkpoint
    if chosen["loss"] in ("mean", "no_labels", "sum_over_tokens"):
        chosen |= {"drop_last": True}  # rows that fill the last batch count, as under DDP
    if chosen["dispatch_batches"]:
        plain |= {"uneven_lengths"}  # which accelerate cannot join
    if chosen["loss"] in ("mean", "no_labels") and chosen["backward"] == "loss":
        plain |= {"even", "uneven_lengths", "data"}  # else the mean of data ranks' means, as under DDP
    if chosen["average"] == "averaged_model" and chosen["lora"]:
        plain |= {"average"}
    if chosen["dtype"] == "bfloat16":
        plain |= {"mixed_precision"}
        if chosen["optimizer"] in ("adamw", "groups", "adafactor"):
            plain |= {"optimizer"}
    return {**chosen, **{name: PLAIN[name] for name in plain}}


def build_data(chosen: Choices, rows: int, seed: int, stream: bool = False) -> Any:
    """Make a data set of the script."""
    if chosen["model"] in OTHERS:
        return data(chosen["model"], rows, seed)
    if stream:
        return data(chosen["model"], rows, seed, stream=True)
    return Rows(rows, seed, even=chosen["even"], uneven_lengths=chosen["uneven_lengths"])


def adapt(chosen: Choices, model: Any) -> Any:
    """Give the model the script's adapters, and let it checkpoint activations."""
    if chosen["lora"]:
        model = with_adapters(training.Script(lora=chosen["lora"]), model)
    if chosen["checkpointing"]:
        model.gradient_checkpointing_enable()
        if chosen["lora"]:
            model.enable_input_require_grads()
    return model


def make_loader(chosen: Choices, rows: int, seed: int, batch: int, training_set: bool) -> DataLoader:
    stream = training_set and chosen["data"] == "stream"
    return DataLoader(
        build_data(chosen, rows, seed, stream),
        batch_size=batch,
        shuffle=training_set and chosen["shuffle"],
        drop_last=training_set and chosen["drop_last"],
        collate_fn=pad if chosen["uneven_lengths"] else None,
        num_workers=chosen["workers"],
    )


def compute_loss(chosen: Choices, accelerator: Accelerator, model: Any, batch: dict) -> torch.Tensor:
    """The script's loss, each of which means the same in one process and over data ranks of DDP."""
    way = chosen["loss"]
    if way == "model":
        return model(**batch).loss
    if way == "two_calls":
        other = {**batch, "input_ids": (3 * batch["input_ids"] + 1) % VOCABULARY}
        return 0.5 * model(**batch).loss + 0.5 * model(**other).loss
    labels = batch["labels"][:, 1:]
    given = batch if way != "no_labels" else {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**given).logits[:, :-1].float()
    if way == "sum_over_tokens":
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = accelerator.gather((labels != -100).sum()).sum()
        return total * accelerator.num_processes / count
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_optimizer(chosen: Choices, model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    match chosen["optimizer"]:
        case "momentum":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True)
        case "adamw":
            return torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
        case "groups":
            groups = [
                {"params": [p for name, p in named if "norm" not in name and not name.endswith("bias")]},
                {"params": [p for name, p in named if "norm" in name or name.endswith("bias")], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW([group for group in groups if group["params"]], lr=2e-3, eps=1e-3)
        case "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
        case _:
            return torch.optim.SGD(trained, lr=0.1)


def clip(chosen: Choices, accelerator: Accelerator, model: Any) -> float | None:
    match chosen["clip"]:
        case "norm" | "when_synchronised":
            return float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        case "small_norm":
            return float(accelerator.clip_grad_norm_(model.parameters(), 0.05))
        case "infinite":
            return float(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf")))
        case "value":
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
        case "torch_norm":
            return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return None


def evaluate(chosen: Choices, accelerator: Accelerator, model: Any, loader: Any) -> dict[str, float]:
    """What an evaluation of the script finds: of losses over equal rows, and of predictions."""
    if chosen["evaluates"] != "in_training_mode":
        model.eval()
    losses, found, objects = [], [], []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        size = len(batch["labels"])
        best = outputs.logits.argmax(-1)
        match chosen["metric"]:
            case "gathered_loss" | "padded":
                losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(size)))
            case "reduced":
                losses.append(accelerator.reduce(outputs.loss.detach().clone(), "mean")[None])
        if chosen["metric"] == "padded":
            best = accelerator.pad_across_processes(best, dim=1, pad_index=0)
        if chosen["metric"] in ("gathered_for_metrics", "padded") and not chosen["uneven_lengths"]:
            best, labels = accelerator.gather_for_metrics((best, batch["labels"]))
            found += [best.flatten(), labels.flatten()]
        if chosen["metric"] == "gathered_objects":
            objects += accelerator.gather_for_metrics([row.flatten().tolist() for row in best], use_gather_object=True)
    model.train()
    numbers: dict[str, float] = {}
    # The mean of a whole batch goes to each of its rows, so that a ragged last batch counts by its rows.
    full = [loss for loss in losses if len(loss)]
    if full and chosen["metric"] != "reduced":
        numbers["eval_loss"] = float(torch.cat(full)[: chosen["eval_rows"]].mean())
    elif full:
        numbers["eval_loss"] = float(torch.stack(full[:-1] or full).mean())
    if found:
        numbers["checksum"] = float(sum((part.double() * (place + 1)).sum() for place, part in enumerate(found)))
        numbers["rows"] = sum(len(part) for part in found)
    if objects:
        numbers |= {"objects": len(objects), "objects_sum": float(sum(map(sum, objects)))}
    return numbers


class Average:
    """An average of weights as scripts write it."""

    def __init__(self, kind: str, model: torch.nn.Module):
        self.kind = kind
        if kind == "ema_by_hand":
            self.means = [p.detach().clone() for p in model.parameters()]
        elif kind == "averaged_model":
            from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

            self.means = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        if self.kind == "ema_by_hand":
            for mean, parameter in zip(self.means, model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
        elif self.kind == "averaged_model":
            self.means.update_parameters(model)

    @torch.no_grad()
    def swap_in(self, model: torch.nn.Module) -> None:
        if self.kind == "ema_by_hand":
            for mean, parameter in zip(self.means, model.parameters(), strict=True):
                parameter.copy_(mean)


class Counted:
    """An object of the script's own in its checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def look(chosen: Choices, model: Any, batch: dict) -> dict[str, float]:
    """What a script reads from its model between the backward pass and the step."""
    match chosen["reads"]:
        case "norm_of_weights":
            return {"norm_of_weights": float(model.get_input_embeddings().weight.detach().norm())}
        case "parameters":
            return {"parameters": model.num_parameters(), "rows": model.get_input_embeddings().weight.shape[0]}
        case "hidden_states":
            with torch.no_grad():
                states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
            return {"layers": len(states)}
    return {}


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """The loop: what it does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    set_seed(5)
    steps_of_accumulation = chosen["steps_of_accumulation"] if chosen["accumulates"] != "no" else 1
    of_accelerator = steps_of_accumulation if chosen["accumulates"] in ("accumulate", "sync_each_batch") else 1
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=chosen["mixed_precision"],
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=of_accelerator, sync_each_batch=chosen["accumulates"] == "sync_each_batch"
        ),
        dataloader_config=DataLoaderConfiguration(
            split_batches=chosen["split_batches"],
            dispatch_batches=chosen["dispatch_batches"],
            use_seedable_sampler=chosen["use_seedable_sampler"],
        ),
    )
    size = chosen["batch"] if chosen["split_batches"] else chosen["batch"] // data_ranks
    loader = make_loader(chosen, chosen["rows"], TRAIN_SEED, size, True)
    eval_loader = make_loader(chosen, chosen["eval_rows"], EVAL_SEED, size, False)
    config = AutoConfig.from_pretrained(folder)
    for name, value in chosen["config"]:
        setattr(config, name, value)
    kind = models.auto_class(config)
    model = kind.from_pretrained(folder, config=config, dtype=getattr(torch, chosen["dtype"])).train()
    freeze(model, chosen["frozen"])
    model = adapt(chosen, model)
    match chosen["made"]:
        case "before_prepare":
            optimizer = make_optimizer(chosen, model)
            model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)
        case "after_prepare":
            model, loader, eval_loader = accelerator.prepare(model, loader, eval_loader)
            optimizer = accelerator.prepare(make_optimizer(chosen, model))
        case _:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare_optimizer(make_optimizer(chosen, model))
            loader, eval_loader = accelerator.prepare_data_loader(loader), accelerator.prepare(eval_loader)
    scheduler: Any = None
    if chosen["schedule"] in ("linear", "cosine"):
        scheduler = get_scheduler(chosen["schedule"], optimizer, 1, 12)
    elif chosen["schedule"] == "prepared_linear":  # which steps once per process, unless batches are split
        times = 1 if chosen["split_batches"] else data_ranks
        scheduler = accelerator.prepare(get_scheduler("linear", optimizer, times, 12 * times))
    elif chosen["schedule"] == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    counted = Counted()
    if chosen["state"] == "custom":
        accelerator.register_for_checkpointing(counted)
    average = Average(chosen["average"], model)
    found: dict[str, Any] = {}
    gradient_keys: list[list[str]] = []

    def take_step(batch: dict, loss: torch.Tensor) -> None:
        numbers = look(chosen, accelerator.unwrap_model(model), batch)
        gradient_keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))
        norm = None
        if chosen["clip"] != "when_synchronised" or accelerator.sync_gradients:
            norm = clip(chosen, accelerator, model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if chosen["schedule"] == "plateau" else []))
        numbers["loss"] = float(accelerator.gather(loss.detach()[None]).mean())
        numbers["rate"] = float(optimizer.param_groups[0]["lr"])
        if norm is not None:
            numbers["norm"] = norm
        found[f"step {len(gradient_keys) + (2 if part == 'after' else 0)}"] = numbers
        average.update(model)
        counted.count += 1

    done = 0
    if part == "after":
        accelerator.load_state(f"{out}/state")
        done = 2
    per_epoch = None
    for epoch in range(chosen["epochs"]):
        reading = loader
        if part == "after" and epoch == 0:
            reading = accelerator.skip_first_batches(loader, done * steps_of_accumulation)
        for number, batch in enumerate(reading):
            ends = (number + 1) % steps_of_accumulation == 0
            around: Any = contextlib.nullcontext()
            if chosen["accumulates"] in ("accumulate", "sync_each_batch"):
                around = accelerator.accumulate(model)
            elif chosen["accumulates"] == "no_sync" and not ends:
                around = accelerator.no_sync(model)
            with around:
                loss = compute_loss(chosen, accelerator, model, batch)
                if of_accelerator == 1 and steps_of_accumulation > 1:
                    loss = loss / steps_of_accumulation
                if chosen["backward"] == "accelerator" or of_accelerator > 1:
                    accelerator.backward(loss)
                else:
                    loss.backward()
                if of_accelerator > 1 and not accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                elif ends:
                    take_step(batch, loss)
                    if chosen["zero_grad"] == "model":
                        model.zero_grad()
                    else:
                        optimizer.zero_grad(set_to_none=chosen["zero_grad"] != "kept")
            if chosen["evaluates"] == "each_step":
                found[f"evaluation {epoch}.{number}"] = evaluate(chosen, accelerator, model, eval_loader)
            if part == "before" and len(gradient_keys) == 2:
                break
        if part == "before":
            break
        if chosen["evaluates"] == "each_epoch":
            found[f"evaluation of epoch {epoch}"] = evaluate(chosen, accelerator, model, eval_loader)
        if chosen["state"] != "no" and epoch == 0:
            accelerator.save_state(f"{out}/kept")
            if chosen["state"] in ("loaded_back", "custom"):
                counted.count = 0
                accelerator.load_state(f"{out}/kept")
                found["counted"] = {"count": counted.count if chosen["state"] == "custom" else 0}
        per_epoch = per_epoch or len(gradient_keys)
    if part == "before":
        accelerator.save_state(f"{out}/state")
    average.swap_in(model)
    found["evaluation"] = evaluate(chosen, accelerator, model, eval_loader)
    inner = accelerator.unwrap_model(model)
    if chosen["generates"]:
        with torch.no_grad():
            tokens = inner.generate(input_ids=Rows(3, 31).tokens[:, :5], max_new_tokens=4, do_sample=False)
        found["generated"] = summarise(tokens)
    save(chosen, accelerator, model, f"{out}/saved")
    return {"found": found, "gradient_keys": gradient_keys, "folder": f"{out}/saved"}


def save(chosen: Choices, accelerator: Accelerator, model: Any, folder: str) -> None:
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(model)
    match chosen["saves"]:
        case "unwrapped":
            inner.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
        case "state_dict":
            inner.save_pretrained(
                folder,
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
            )
        case "model_itself":
            inner.save_pretrained(folder)
        case _:
            accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    if chosen["resumes"] and (name in ("step 1", "step 2") or name.startswith("evaluation 0.")):
        return True
    low = "bf" in chosen["dtype"] + chosen["mixed_precision"]
    if low and (name == "generated" or key in ("checksum", "objects_sum")):
        return True
    # Rows with unlike counts of targets: without gradients each data rank has the loss of its own rows.
    uneven = chosen["metric"] == "reduced" or chosen["uneven_lengths"] or not chosen["even"]
    # A loop's own mean is weighed in its backward pass: what the script logs is the mean of data ranks' means.
    return uneven and (key == "eval_loss" or key == "loss" and chosen["loss"] in ("mean", "no_labels"))


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    if "bf" in chosen["dtype"] + chosen["mixed_precision"]:
        return 3e-2, 3e-2
    return (5e-4, 1e-3) if chosen["optimizer"] == "adafactor" else (3e-5, 1e-5)


KIND = Kind(CHOICES, fit, script, tolerances, leaves_out)
