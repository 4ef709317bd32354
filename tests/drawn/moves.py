"""A training of Trainer that moves: it stops, and goes on in another place, three times.

Places are layouts of one, two and four ranks, Trainer in one process that has imported this package, and plain
checkpoints that `hf-parallel export` makes. Compared with one process that never stops are all of Trainer's log, its
state, the set of gradients of the last steps and the saved folder.
"""

import shutil
from typing import Any

import torch
from transformers import PrinterCallback, Trainer

from hf_parallel import cli
from tests.drawn import trainers
from tests.drawn.bench import EXPERTS, Choices, Kind, draw_layout, summarise
from tests.training import activate

#: Steps of a training, and of what is trained in one place.
STEPS, OF_A_PLACE = 8, 2
MOVES = range(1, STEPS // OF_A_PLACE)
#: Keys that most scripts, or most sizes of an axis, are refused with.
LEFT_OUT = ("padding_free", "monitor", "tp_mesh", "pipeline_split", "hierarchical_shard")
#: Layouts of a stranger's choice; None is one process without a layout.
PLACES = (None, "tp=1", *(draw_layout(seed, {"model": "mixtral"}, (2, 2, 4), LEFT_OUT) for seed in range(150)))

WAYS: dict[str, tuple] = {
    "model": ("llama", *trainers.DECODERS, *EXPERTS),
    "rows": (44, 24, 29, 53),
    "data": ("rows", "list", "table", "stream"),
    **{name: trainers.WAYS[name] for name in ("uneven_lengths", "masked", "loss", "frozen", "lora", "dtype")},
    "optimizers": ("of_arguments", "own", "own_with_schedule", "class"),
    **{f"place_{number}": PLACES for number in MOVES},
    **{f"way_{number}": ("folder", "newest", "copied", "elsewhere", "exported", "overshot") for number in MOVES},
    **{f"accumulates_{number}": (1, 2) for number in range(STEPS // OF_A_PLACE)},
    "best": ("no", "loss"),
    "resumes": (True,),
}
ARGUMENTS: dict[str, tuple] = {
    "optim": ("adamw_torch", "sgd", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad"),
    "lr_scheduler_type": trainers.ARGUMENTS["lr_scheduler_type"],
    "warmup_steps": (0, 1, 0.4, 5),
    **{
        name: trainers.ARGUMENTS[name]
        for name in (
            *("weight_decay", "max_grad_norm", "label_smoothing_factor", "gradient_checkpointing", "logging_steps"),
            *("logging_first_step", "include_num_input_tokens_seen", "eval_strategy", "eval_steps"),
            *("save_total_limit", "dataloader_drop_last", "dataloader_num_workers", "data_seed"),
            *("average_tokens_across_devices", "restore_callback_states_from_checkpoint", "train_sampling_strategy"),
        )
    },
}
CHOICES = {**WAYS, **ARGUMENTS}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    chosen = {**trainers.PLAIN, **chosen, "resumes": False, "max_steps": STEPS, "num_train_epochs": 1, "batch": 8}
    if chosen["best"] != "no":
        chosen |= {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    fitted = trainers.fit(chosen)
    if fitted["train_sampling_strategy"] == "group_by_length":
        fitted["train_sampling_strategy"] = "random"  # draws another order after a stop in one process, too
    ways = {fitted[f"way_{number}"] for number in MOVES}
    if "overshot" in ways or fitted["best"] != "no":  # with the best alone, Trainer ends by deleting the last one
        fitted["save_total_limit"] = None
    if fitted["dataloader_drop_last"]:
        fitted |= dict.fromkeys((name for name in fitted if name.startswith("accumulates")), 1)
    for number in MOVES:
        # Plain Trainer alone trains on some rows of streams twice, and loads no weights of the Hub's names.
        unlike = fitted["data"] == "stream" or fitted["model"] in ("gpt_neox", *EXPERTS)
        if unlike and fitted[f"place_{number}"] is None:
            fitted[f"place_{number}"] = "tp=1"
        if fitted["model"] not in EXPERTS and fitted[f"place_{number}"]:
            fitted[f"place_{number}"] = fitted[f"place_{number}"].replace(",ep=2", "")
    return {**{name: fitted[name] for name in CHOICES}, "resumes": True}


def parts_of(chosen: Choices, spec: str) -> list[tuple[str, str | None]]:
    """What comes after another: a training in a place, or a checkpoint that is written anew."""
    parts: list[tuple[str, str | None]] = [("0", spec)]
    for number in MOVES:
        if chosen[f"way_{number}"] in ("copied", "exported"):
            parts.append((f"{chosen[f'way_{number}']} {number}", None))
        parts.append((str(number), chosen[f"place_{number}"]))
    return parts


def home(chosen: Choices, out: str, number: int) -> str:
    """The folder of the checkpoints of place `number`."""
    moved = sum(chosen[f"way_{earlier}"] == "elsewhere" for earlier in range(1, number + 1))
    return f"{out}/home {moved}"


def checkpoint(chosen: Choices, out: str, number: int) -> Any:
    """What place `number` goes on from, as its script names it."""
    newest = f"{home(chosen, out, number - 1)}/checkpoint-{number * OF_A_PLACE}"
    match chosen[f"way_{number}"]:
        case "newest":
            return True
        case "copied" | "exported":
            return f"{out}/{chosen[f'way_{number}']} {number}/checkpoint-{number * OF_A_PLACE}"
        case _:
            return newest


class Saves(trainers.TrainerCallback):
    """Saves at the end of each place, and stops there or a step later."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step % OF_A_PLACE == 0
        control.should_training_stop |= state.global_step == self.stop


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name, in the place that `part` names."""
    if part.startswith(("copied", "exported")):
        number = int(part.split()[-1])
        name = f"checkpoint-{number * OF_A_PLACE}"
        source, place = f"{home(chosen, out, number - 1)}/{name}", f"{out}/{part}/{name}"
        # An export is refused where a checkpoint is plain Trainer's already.
        if part.startswith("copied") or cli.main(["export", source, place, "--trainer"]):
            shutil.copytree(source, place)
        return {}
    whole, number = part == "whole", 0 if part == "whole" else int(part)
    data_ranks = activate(spec)
    torch.manual_seed(5)
    stop = None if whole or number == STEPS // OF_A_PLACE - 1 else OF_A_PLACE * (number + 1)
    if stop is not None and chosen[f"way_{number + 1}"] == "overshot":
        stop += 1
    keeper, given = trainers.Keeper(), {**trainers.PLAIN, **chosen, "max_steps": STEPS}
    model = trainers.load(given, folder)
    accumulates = chosen[f"accumulates_{number}"]
    of_saves = {"save_strategy": "steps", "save_steps": 1000}
    if chosen["best"] != "no":
        of_saves |= {"load_best_model_at_end": False, "metric_for_best_model": "loss", "greater_is_better": False}
    sizes = {"per_device_train_batch_size": 8 // data_ranks // accumulates}
    sizes |= {"gradient_accumulation_steps": accumulates, "save_total_limit": chosen["save_total_limit"]}
    arguments = trainers.read_arguments(given, home(chosen, out, number), data_ranks, **sizes, **of_saves)
    options = trainers.options_of(given, model)
    trainer = trainers.KINDS.get(chosen["loss"], Trainer)(
        model=model, args=arguments, callbacks=[keeper, Saves(stop)], **options
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if number == 0 else checkpoint(chosen, out, number))
    found = trainers.read_state(trainer)
    found["evaluate"] = trainer.evaluate()
    predicted = trainer.predict(trainers.build_data(given, 9, 21, False))
    if not chosen["uneven_lengths"]:
        found["predictions"] = summarise(predicted.predictions)
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    if key == "train_loss":  # the mean over the steps of one place
        return True
    return trainers.leaves_out({**trainers.PLAIN, **chosen, "resumes": False}, name, key)


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    return trainers.tolerances({**trainers.PLAIN, **chosen})


KIND = Kind(CHOICES, fit, script, tolerances, leaves_out, left_out=LEFT_OUT, parts=parts_of)
