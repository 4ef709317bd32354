"""What scripts do with a model between two steps and between a backward pass and its step, one thing after another.

Each thing is done by all ranks, in a loop of Accelerate or in a callback of Trainer, and gives numbers of the whole
model. Compared are those, each step's loss and norm, the set of gradients and the saved folder.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tests import models
from tests.drawn.bench import EXPERTS, Choices, Kind, summarise
from tests.drawn.loops import adapt
from tests.drawn.trainers import ADAPTED, DECODERS, WAYS
from tests.rows import VOCABULARY, Rows
from tests.training import EVAL_SEED, TRAIN_SEED, activate

#: Keys of a spec that other kinds of scripts draw.
_OF_OTHERS = (
    *("monitor", "nan_action", "async_save", "padding_free", "attention", "tp_mesh", "tiled_mlp", "pipeline_split"),
    *("pipeline_microbatches", "context_parallel", "lean_loss"),
)
#: Steps of a training.
STEPS = 5


@dataclass
class Scene:
    """What a script holds when it does something: its model, optimizer and what it put aside before."""

    model: Any
    optimizer: Any
    make_optimizer: Callable[[], Any]
    out: str
    accelerator: Any
    chosen: Choices
    step: int = 0
    aside: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> Any:
        """The layers of the decoder."""
        inner = self.model.get_base_model() if self.chosen["lora"] else self.model
        lists = [module for module in inner.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
        return lists[0]

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        """A batch of the script's own, alike on all ranks."""
        tokens = Rows(3, 40 + self.step).tokens[:, :9].to(self.model.device)
        return {"input_ids": tokens, "labels": tokens}


# ---- what only reads -----------------------------------------------------------------------------------------------


def norms_of_weights(scene: Scene) -> dict[str, float]:
    return {name: float(p.detach().float().norm()) for name, p in scene.model.named_parameters()}


def norms_of_gradients(scene: Scene) -> dict[str, float]:
    return {name: float(p.grad.float().norm()) for name, p in scene.model.named_parameters() if p.grad is not None}


def shapes(scene: Scene) -> dict[str, float]:
    return {f"{name} {place}": n for name, p in scene.model.named_parameters() for place, n in enumerate(p.shape)}


def trained(scene: Scene) -> dict[str, float]:
    return {name: p.requires_grad for name, p in scene.model.named_parameters()}


def forward(scene: Scene) -> dict[str, float]:
    was = scene.model.training
    scene.model.eval()
    with torch.no_grad():
        outputs = scene.model(**scene.batch)
    scene.model.train(was)
    return {"loss": float(outputs.loss), **summarise(outputs.logits)}


def forward_with_gradients(scene: Scene) -> dict[str, float]:
    return {"loss": float(scene.model(**scene.batch).loss.detach())}


def generate(scene: Scene) -> dict[str, float]:
    with torch.no_grad():
        return summarise(scene.model.generate(scene.batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False))


def sample(scene: Scene) -> dict[str, float]:
    torch.manual_seed(13)
    return summarise(scene.model.generate(scene.batch["input_ids"][:, :5], max_new_tokens=4, do_sample=True, top_k=5))


def embed(scene: Scene) -> dict[str, float]:
    with torch.no_grad():
        weight = scene.model.get_input_embeddings().weight
    return {"rows": weight.shape[0], "norm": float(weight.detach().float().norm())}


def state_dict(scene: Scene) -> dict[str, float]:
    state = scene.accelerator.get_state_dict(scene.model)
    return {name: float(value.double().abs().sum()) for name, value in state.items()} if dist_rank() == 0 else {}


def save_pretrained(scene: Scene) -> dict[str, float]:
    scene.model.save_pretrained(f"{scene.out}/saved {scene.step}")
    wait()
    if scene.chosen["lora"] or dist_rank() > 0:
        return {}
    from safetensors.torch import load_file

    state = load_file(f"{scene.out}/saved {scene.step}/model.safetensors")
    return {name: float(value.double().abs().sum()) for name, value in state.items()}


def copy_and_compute(scene: Scene) -> dict[str, float]:
    other = copy.deepcopy(scene.model)
    with torch.no_grad():
        loss = other(**scene.batch).loss
    return {"loss": float(loss), "parameters": other.num_parameters()}


def load_a_teacher(scene: Scene) -> dict[str, float]:
    if "teacher" not in scene.aside:
        config = AutoConfig.from_pretrained(scene.aside["folder"])
        kind = models.auto_class(config)
        scene.aside["teacher"] = kind.from_pretrained(scene.aside["folder"]).eval().requires_grad_(False)
    with torch.no_grad():
        return {"loss": float(scene.aside["teacher"](**scene.batch).loss)}


def moments(scene: Scene) -> dict[str, float]:
    named = {p: name for name, p in scene.model.named_parameters()}
    inner = getattr(scene.optimizer, "optimizer", scene.optimizer)
    return {
        f"{named[p]} {key}": float(value.float().norm())
        for p, state in inner.state.items()
        for key, value in state.items()
        if torch.is_tensor(value) and value.ndim and p in named
    }


# ---- what changes the model ---------------------------------------------------------------------------------------


def freeze_first(scene: Scene) -> None:
    scene.layers[0].requires_grad_(False)


def freeze_embeddings(scene: Scene) -> None:
    scene.model.get_input_embeddings().weight.requires_grad_(False)


def freeze_norms(scene: Scene) -> None:
    for name, p in scene.model.named_parameters():
        if "norm" in name:
            p.requires_grad = False


def unfreeze(scene: Scene) -> None:
    for name, p in scene.model.named_parameters():
        p.requires_grad_(not scene.chosen["lora"] or "lora" in name)


@torch.no_grad()
def shrink(scene: Scene) -> None:
    for p in scene.model.parameters():
        p.mul_(0.97)


def shrink_data(scene: Scene) -> None:
    for p in scene.model.parameters():
        if p.ndim > 1:
            p.data = p.data * 0.98


def write_rows(scene: Scene) -> None:
    weight = scene.model.get_input_embeddings().weight
    weight.data[-3:] = weight.data[:-3].mean(0)


def shrink_modules(scene: Scene) -> None:
    for module in scene.layers[1].modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            module.weight.data.mul_(0.9)


def freeze_modules(scene: Scene) -> None:
    for module in scene.layers[0].modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad = False


def keep_a_loss(scene: Scene) -> dict[str, float]:
    scene.aside["loss"] = scene.model(**scene.batch).loss
    return {"loss": float(scene.aside["loss"].detach())}


def optimizer_of_head(scene: Scene) -> None:
    head = scene.model.get_output_embeddings()
    if head is not None and head.weight.requires_grad and head.weight.grad is not None:
        torch.optim.SGD([head.weight], lr=0.05).step()


def draw_a_layer(scene: Scene) -> None:
    torch.manual_seed(17)
    for module in scene.layers[1].modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.03)


def put_weights_aside(scene: Scene) -> None:
    scene.aside["weights"] = {name: p.detach().clone() for name, p in scene.model.named_parameters()}


@torch.no_grad()
def take_weights_back(scene: Scene) -> None:
    for name, p in scene.model.named_parameters():
        if name in scene.aside.get("weights", {}):
            p.copy_(scene.aside["weights"][name])


@torch.no_grad()
def mix_with_those_aside(scene: Scene) -> None:
    for name, p in scene.model.named_parameters():
        if name in scene.aside.get("weights", {}):
            p.lerp_(scene.aside["weights"][name], 0.5)


def put_state_aside(scene: Scene) -> None:
    scene.aside["state"] = {name: value.clone() for name, value in scene.model.state_dict().items()}


def load_state_back(scene: Scene) -> None:
    if "state" in scene.aside:
        scene.model.load_state_dict(scene.aside["state"])


def copy_layer(scene: Scene) -> None:
    scene.layers[0].load_state_dict(scene.layers[0].state_dict())


def toggle_checkpointing(scene: Scene) -> None:
    if scene.model.is_gradient_checkpointing:
        scene.model.gradient_checkpointing_disable()
    else:
        scene.model.gradient_checkpointing_enable()
        if scene.chosen["lora"]:
            scene.model.enable_input_require_grads()


def evaluation_mode(scene: Scene) -> None:
    scene.model.eval()


def training_mode(scene: Scene) -> None:
    scene.model.train()


def grow_vocabulary(scene: Scene) -> dict[str, float]:
    scene.model.resize_token_embeddings(VOCABULARY + 6)
    return {"rows": scene.model.get_input_embeddings().weight.shape[0]}


def tie(scene: Scene) -> None:
    scene.model.tie_weights()


def add_hook(scene: Scene) -> None:
    if "hook" not in scene.aside:
        scene.aside["hook"] = scene.layers[1].register_forward_hook(lambda module, args, output: None)


def remove_hook(scene: Scene) -> None:
    if "hook" in scene.aside:
        scene.aside.pop("hook").remove()


# ---- what changes gradients and the optimizer -----------------------------------------------------------------------


def scale_gradients(scene: Scene) -> None:
    for p in scene.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def cut_gradients_of_rows(scene: Scene) -> None:
    weight = scene.model.get_input_embeddings().weight
    if weight.grad is not None:
        weight.grad[:100] = 0


def drop_some_gradients(scene: Scene) -> None:
    for name, p in scene.model.named_parameters():
        if "mlp" in name:
            p.grad = None


def clip_values(scene: Scene) -> None:
    torch.nn.utils.clip_grad_value_([p for p in scene.model.parameters() if p.grad is not None], 2e-3)


def clip_norm(scene: Scene) -> dict[str, float]:
    return {"norm": float(torch.nn.utils.clip_grad_norm_(scene.model.parameters(), 0.3))}


def one_more_backward(scene: Scene) -> None:
    scene.accelerator.backward(scene.model(**scene.batch).loss)


def step_by_hand(scene: Scene) -> None:
    with torch.no_grad():
        for p in scene.model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.02)


def change_rate(scene: Scene) -> None:
    for group in scene.optimizer.param_groups:
        group["lr"] *= 0.7


def clear_moments(scene: Scene) -> None:
    getattr(scene.optimizer, "optimizer", scene.optimizer).state.clear()


def reload_optimizer(scene: Scene) -> None:
    scene.optimizer.load_state_dict(copy.deepcopy(scene.optimizer.state_dict()))


def zero_gradients(scene: Scene) -> None:
    scene.optimizer.zero_grad()


def zero_gradients_in_place(scene: Scene) -> None:
    scene.model.zero_grad(set_to_none=False)


def new_optimizer(scene: Scene) -> None:
    scene.optimizer = scene.make_optimizer()


# ---- what scripts do with adapters --------------------------------------------------------------------------------


def forward_without_adapters(scene: Scene) -> dict[str, float]:
    with torch.no_grad(), scene.model.disable_adapter():
        return {"loss": float(scene.model(**scene.batch).loss)}


def merge_and_unmerge(scene: Scene) -> dict[str, float]:
    scene.model.merge_adapter()
    merged = forward(scene)
    scene.model.unmerge_adapter()
    return merged


def state_of_adapters(scene: Scene) -> dict[str, float]:
    whole = scene.accelerator.get_state_dict(scene.model)
    state = get_peft_model_state_dict(scene.model, state_dict=whole) if dist_rank() == 0 else {}
    return {name: float(value.double().abs().sum()) for name, value in state.items()}


def put_adapters_aside(scene: Scene) -> None:
    scene.model.save_pretrained(f"{scene.out}/adapters")
    wait()
    scene.aside["adapters"] = True


def load_adapters_beside(scene: Scene) -> dict[str, float]:
    if "adapters" not in scene.aside or "modules_to_save" in dict(scene.chosen["lora"]):
        return {}
    scene.model.load_adapter(f"{scene.out}/adapters", adapter_name="beside", is_trainable=False)
    scene.model.set_adapter("beside")
    numbers = forward(scene)
    scene.model.set_adapter("default")
    scene.model.delete_adapter("beside")
    return numbers


def halve_scaling(scene: Scene) -> None:
    for module in scene.model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)


def shrink_adapters(scene: Scene) -> None:
    for name, module in scene.model.named_modules():
        if name.endswith("lora_B.default"):
            module.weight.data.mul_(0.9)


def freeze_a(scene: Scene) -> None:
    for name, module in scene.model.named_modules():
        if name.endswith("lora_A.default"):
            module.weight.requires_grad = False


ADAPTED_ONLY = (
    *(forward_without_adapters, merge_and_unmerge, state_of_adapters, put_adapters_aside, load_adapters_beside),
    *(halve_scaling, shrink_adapters, freeze_a),
)
READS = (
    *(norms_of_weights, shapes, trained, forward, forward_with_gradients, generate, sample, embed),
    *(state_dict, save_pretrained, copy_and_compute, load_a_teacher, moments),
)
CHANGES = (
    *(freeze_first, freeze_embeddings, freeze_norms, unfreeze, shrink, shrink_data, write_rows, draw_a_layer),
    *(shrink_modules, freeze_modules, keep_a_loss),
    *(put_weights_aside, take_weights_back, mix_with_those_aside, put_state_aside, load_state_back, copy_layer),
    *(toggle_checkpointing, evaluation_mode, training_mode, grow_vocabulary, tie, add_hook, remove_hook),
    *(change_rate, clear_moments, reload_optimizer),
)
BETWEEN_STEPS = (*READS, *CHANGES, *ADAPTED_ONLY, step_by_hand, zero_gradients)
BEFORE_A_STEP = (
    *(*READS, norms_of_gradients, scale_gradients, cut_gradients_of_rows, drop_some_gradients, clip_values, clip_norm),
    *(one_more_backward, step_by_hand, change_rate, put_weights_aside, shrink, toggle_checkpointing),
    *(zero_gradients, zero_gradients_in_place, keep_a_loss, shrink_modules, optimizer_of_head),
)
IN_LOOPS = (new_optimizer,)
ACTIONS = {action.__name__: action for action in {*BETWEEN_STEPS, *BEFORE_A_STEP, *IN_LOOPS}}

_after = ("nothing", *(action.__name__ for action in (*BETWEEN_STEPS, *IN_LOOPS)))
_before = ("nothing", *(action.__name__ for action in BEFORE_A_STEP))
CHOICES: dict[str, tuple] = {
    "model": ("llama", *DECODERS, *ADAPTED, *EXPERTS),
    "lora": WAYS["lora"],
    "frame": ("loop", "trainer"),
    "optimizer": ("sgd", "momentum", "adamw"),
    "accumulates": (1, 2),
    "clip": (False, True),
    "checkpointing": (False, True),
    **{f"after_{step}": _after for step in range(1, STEPS)},
    **{f"later_{step}": _after for step in range(1, STEPS)},
    **{f"before_{step}": _before for step in range(1, STEPS + 1)},
}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script makes together."""
    plain: set[str] = set()
    if chosen["model"] not in ADAPTED:
        chosen = {**chosen, "lora": PLAIN["lora"]}
    places = [name for name in chosen if name.split("_")[0] in ("after", "later", "before")]
    if chosen["frame"] == "trainer":
        plain |= {name for name in places if chosen[name] in ("new_optimizer", "one_more_backward")}
        plain |= {"clip"}
    if chosen["lora"]:
        plain |= {name for name in places if chosen[name] in ("grow_vocabulary", "draw_a_layer")}
    else:
        plain |= {name for name in places if chosen[name] in {action.__name__ for action in ADAPTED_ONLY}}
    chosen = {**chosen, **{name: PLAIN[name] for name in plain}}
    for name in places:
        if chosen[name] == "grow_vocabulary" and chosen["frame"] == "loop":  # which a new optimizer must follow
            chosen[name.replace("after", "later")] = "new_optimizer" if name.startswith("after") else "nothing"
            if name.startswith("later"):
                chosen[name] = "nothing"
        elif chosen[name] == "grow_vocabulary":
            chosen[name] = "nothing"
    return chosen


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def join(numbers: dict[str, float]) -> dict[str, float]:
    """All that ranks found of their parts of the model; what two found must be one number."""
    if not dist.is_initialized():
        return numbers
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, numbers)
    joined: dict[str, float] = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            if joined.setdefault(name, value) != value and abs(joined[name] - value) > 1e-5 * abs(value):
                joined[f"{name} on rank {rank}"] = value
    return joined


def act(scene: Scene, place: str, found: dict[str, Any]) -> None:
    """Do what was drawn for this place."""
    name = scene.chosen.get(place, "nothing")
    if name == "nothing":
        return
    numbers = ACTIONS[name](scene)
    if numbers is not None:
        found[f"{place} {name}"] = join(numbers)


def make_optimizer(chosen: Choices, model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    match chosen["optimizer"]:
        case "momentum":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
        case _:
            return torch.optim.SGD(trained, lr=0.1)


def load(chosen: Choices, folder: str) -> Any:
    config = AutoConfig.from_pretrained(folder)
    return adapt(chosen, models.auto_class(config).from_pretrained(folder).train())


def in_loop(chosen: Choices, folder: str, out: str, data_ranks: int) -> dict[str, Any]:
    """A loop of Accelerate."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen["accumulates"])
    rows = Rows(8 * STEPS * chosen["accumulates"], TRAIN_SEED, even=True)
    loader = DataLoader(rows, batch_size=8 // data_ranks)
    model = load(chosen, folder)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(chosen, model), loader)
    inner = accelerator.unwrap_model(model)
    scene = Scene(
        inner, optimizer, lambda: accelerator.prepare(make_optimizer(chosen, inner)), out, accelerator, chosen
    )
    scene.aside["folder"] = folder
    found: dict[str, Any] = {}
    gradient_keys = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if not accelerator.sync_gradients:
                scene.optimizer.step()
                scene.optimizer.zero_grad()
                continue
            scene.step += 1
            act(scene, f"before_{scene.step}", found)
            gradient_keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))
            numbers = {"loss": float(accelerator.gather(loss.detach()[None]).mean())}
            if chosen["clip"]:
                numbers["norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            scene.optimizer.step()
            scene.optimizer.zero_grad()
            found[f"step {scene.step}"] = numbers
            act(scene, f"after_{scene.step}", found)
            act(scene, f"later_{scene.step}", found)
    found["evaluation"] = forward(scene)
    inner.save_pretrained(f"{out}/saved")
    wait()
    return {"found": found, "gradient_keys": gradient_keys, "folder": f"{out}/saved"}


class Actor(TrainerCallback):
    """Does what was drawn, as callbacks of scripts do."""

    def __init__(self, chosen: Choices, folder: str, out: str) -> None:
        self.chosen, self.folder, self.out = chosen, folder, out
        self.found: dict[str, Any] = {}
        self.gradient_keys: list[list[str]] = []
        self.scene: Any = None
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self.scene is None:
            self.scene = Scene(model, optimizer, lambda: None, self.out, self.trainer.accelerator, self.chosen)
            self.scene.aside["folder"] = self.folder
        self.scene.step = state.global_step + 1
        act(self.scene, f"before_{self.scene.step}", self.found)
        self.gradient_keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))

    def on_step_end(self, args, state, control, **kwargs):
        act(self.scene, f"after_{state.global_step}", self.found)
        act(self.scene, f"later_{state.global_step}", self.found)


def in_trainer(chosen: Choices, folder: str, out: str, data_ranks: int) -> dict[str, Any]:
    """A callback of Trainer."""
    actor = Actor(chosen, folder, out)
    arguments = TrainingArguments(
        output_dir=out,
        use_cpu=True,
        per_device_train_batch_size=8 // data_ranks,
        per_device_eval_batch_size=8 // data_ranks,
        gradient_accumulation_steps=chosen["accumulates"],
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        learning_rate=1e-3 if chosen["optimizer"] == "adamw" else 0.1,
        optim="adamw_torch" if chosen["optimizer"] == "adamw" else "sgd",
        adam_epsilon=1e-3,
    )
    rows = Rows(8 * STEPS * chosen["accumulates"], TRAIN_SEED)
    trainer = Trainer(load(chosen, folder), arguments, train_dataset=rows, callbacks=[actor])
    actor.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = {f"log {place}": entry for place, entry in enumerate(trainer.state.log_history)} | actor.found
    found["evaluation"] = trainer.evaluate(Rows(13, EVAL_SEED))
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": actor.gradient_keys, "folder": f"{out}/saved"}


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name."""
    data_ranks = activate(spec)
    set_seed(5)
    os.makedirs(out, exist_ok=True)
    return (in_loop if chosen["frame"] == "loop" else in_trainer)(chosen, folder, out, data_ranks)


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    return key.endswith("flos")


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    return 5e-5, 2e-5


KIND = Kind(CHOICES, fit, script, tolerances, leaves_out, left_out=_OF_OTHERS)
