"""TRL's own scripts (`trl sft`, `trl dpo`, …) as installed, with their own flags, on a tiny model and tiny data.

`script` runs what `python -m trl.scripts.sft --flag …` runs, in this process; `write_data` makes local folders that
stand for the Hub's: one per kind of data set, with a `train` and a `test` split as JSON lines. `TrlRuns.check`
compares a script's loss, gradient norm, TRL's own metrics, set of gradients and saved folder with one process.
"""

import importlib
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import torch
import trl
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, PrinterCallback, trainer

from hf_parallel.hooks import runtime
from tests import models, rollouts, trl_experimental
from tests.distributed import run, run_alone
from tests.training import Outcome, Recorder, activate, axes, compared, key_differences, none, weight_differences

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<unk>"]
#: 13: a ragged last batch, of which a data rank of two has less than the other; 6: less than one batch.
ROWS = {"train": 64, "test": 13, "validation": 6}
STEPS = 5
#: Models of scripts; 4 bits hold whole blocks of the wide one.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "scores": {"classifier": True},
    "wide": {"hidden_size": 128, "intermediate_size": 256},
    "mixtral": {"kind": "mixtral_balanced"},
    "level": {"initializer_range": 1e-3},  # its tokens are nearly as likely as each other
    "gpt2": {"kind": "gpt2"},  # counts padding for positions
}
LORA = "--use_peft --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear --learning_rate 1.0"
RAGGED = "--dataset_train_split test --max_steps 4 --eval_strategy steps --eval_steps 3"
SYNCED = "--sync_ref_model true --ref_model_sync_steps 2"  # the reference follows the model
#: Cases of SFT: data and flags.
SFT = {
    "text": ("text", ""),
    "completion": ("completion", ""),  # completion-only by default
    "adapters": ("completion", LORA),
    "chat": ("chat", "--assistant_only_loss true"),
    "packing": ("text", "--packing true --max_length 32"),
    "ragged": ("completion", RAGGED),
    "joined": ("text", RAGGED + " --padding_free true --max_length None"),
    "dft": ("text", "--loss_type dft --gradient_accumulation_steps 2 --max_steps 3"),
}
#: Flags of DPO and KTO, and of rewards.
PREFERENCE = {
    "reference": SYNCED,
    "adapters": LORA,
    "precomputed": "--precompute_ref_log_probs true",
    "ragged": RAGGED,
    "few": "--dataset_train_split validation --max_steps 2",  # less than one batch
}
REWARD = {"whole": "", "adapters": LORA + " --lora_task_type SEQ_CLS", "ragged": RAGGED}
#: Of what is logged, what depends on time, or on how wide a batch is padded.
NOT_COMPARED = ("runtime", "per_second", "total_flos", "step_time")
#: Margins of a model that is its reference still are zero but for what fp32 rounds in sums of size 100 (1e-7 here,
#: while those of a step that was trained are 1e-4 and more): their signs, whose mean an accuracy is, are chance.
ROUNDED = 1e-6
#: Imported here, once: each run would spend a second on it.
TRAINERS = (
    *(trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer),
    *(trl.GRPOTrainer, trl.RLOOTrainer),
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and some pairs, which the tiny models' vocabulary holds, with a chat template."""
    tokenizer = Tokenizer(tokenizer_models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kept = [chr(code) for code in range(33, 127)] + ["Ġ"]
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=SPECIAL, initial_alphabet=kept, show_progress=False)
    tokenizer.train_from_iterator([topics["assert"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(folder: str, kind: str = "llama", classifier: bool = False, **changes: Any) -> None:
    """A tiny model with its tokenizer, in Hub format; with one score per sequence instead of a head if asked."""
    model = models.build(kind, max_position_embeddings=128, eos_token_id=0, pad_token_id=1, **changes)
    if classifier:
        torch.manual_seed(models.SEED)
        config = model.config
        config.num_labels = 1
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def write_data(root: str) -> None:
    """Folders `text`, `completion`, …: what the trainers call language modelling, prompt-completion, … data."""
    words = topics["assert"].split()
    draw = random.Random(3)

    def some(least: int, most: int) -> str:
        start = draw.randrange(len(words) - most)
        return " ".join(words[start : start + draw.randint(least, most)])

    def row(kind: str) -> dict[str, Any]:
        if kind == "text":
            return {"text": some(3, 9)}
        if kind == "prompt":
            return {"prompt": some(2, 5)}
        if kind == "context":
            return {"prompt": some(2, 5), "privileged_context": some(1, 4)}
        if kind == "completion":
            return {"prompt": some(2, 5), "completion": " " + some(1, 6)}
        if kind == "chat":
            turns = [("user", some(2, 4)), ("assistant", some(1, 5))]
            return {"messages": [{"role": role, "content": text} for role, text in turns]}
        pair = {"prompt": some(2, 4), "chosen": " " + some(1, 5), "rejected": " " + some(1, 5)}
        return {**pair, "reference": " " + some(1, 5)} if kind == "triple" else pair

    for kind in ("text", "completion", "chat", "preference", "prompt", "triple", "context"):
        folder = Path(root, kind)
        folder.mkdir(parents=True)
        for split, count in ROWS.items():
            lines = [json.dumps(row(kind)) for _ in range(count)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


class AllLogs(Recorder):
    """Keeps every log, metrics of the trainer included."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({key: value for key, value in compared(logs).items() if isinstance(value, (int, float))})


#: Of `trl`, those that draw tokens.
GENERATING = ("grpo", "rloo", "distillation", *trl_experimental.GENERATING)


def script(
    name: str,
    flags: tuple[str, ...],
    root: str,
    out: str,
    spec: str | None = None,
    batch: int = 8,
    real_draws: bool = False,
    seed_steps: bool = False,
) -> Outcome:
    """Run `trl NAME FLAGS` in steps of `batch` rows over all data ranks. Draws belong to rows, or to a step."""
    datasets.config.HF_DATASETS_CACHE = Path(root, "cache")
    data_rank = _activate(spec)
    rows = batch // axes(spec)["data_ranks"]
    if name in GENERATING and not real_draws:
        rollouts.draw_by_row(
            data_rank, rows if name in trl_experimental.RAGGED else None, trl_experimental.ANSWERS.get(name, 1)
        )
    datasets.disable_progress_bars()
    recorder = AllLogs()
    callbacks = [recorder, rollouts.SeedEachStep()] if seed_steps else [recorder]
    trainer.DEFAULT_CALLBACKS = [*callbacks, *trainer.DEFAULT_CALLBACKS]  # a script takes no callbacks
    PrinterCallback.on_log = lambda *args, **kwargs: None
    common = {
        **{"output_dir": out, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        **{"use_cpu": "true", "bf16": "false", "disable_tqdm": "true", "optim": "sgd", "learning_rate": 0.1},
        **{"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows},
    }
    arguments = [word for key, value in common.items() for word in (f"--{key}", str(value))]
    experimental = name in trl_experimental.KINDS
    module = trl_experimental.Script(name) if experimental else importlib.import_module(f"trl.scripts.{name}")
    parser = module.make_parser()
    module.main(*parser.parse_args_and_config([*arguments, *flags], fail_with_unknown_args=False))
    return Outcome(recorder.logs, recorder.gradient_keys, out)


def _activate(spec: str | None) -> int:
    """Make the layout active; returns the data rank."""
    activate(spec)
    return runtime.mesh().data_rank if spec else 0


def generating(kind: str, model: str, out: str, spec: str, settings: dict[str, Any], **more: Any) -> int:
    """A trainer that draws tokens while it trains, made but not run; returns the seed it goes on from."""
    _activate(spec)
    prompts = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    config, trainer_class = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    arguments = config(out, report_to="none", bf16=False, use_cpu=True, **settings)
    trainer_class(model, rollouts.reward, arguments, prompts, **more)
    return torch.initial_seed()


class TrlRuns:
    """Runs TRL's scripts under a folder of their own; models, data and references are made once per session."""

    def __init__(self, root: Path):
        self.root = root
        self.references: dict[Any, Outcome] = {}
        self.count = 0
        write_data(str(root / "data"))

    def model(self, name: str, write: Callable[[str], None] | None = None) -> str:
        """Folder of one of `MODELS`, or of what `write(folder)` makes of that name."""
        folder = self.root / "models" / name
        if not folder.exists():
            run_alone(write or partial(write_model, **MODELS[name]), str(folder))
        return str(folder)

    def words(self, name: str, data: str, flags: str) -> tuple[str, ...]:
        """The command line behind `trl NAME`; `MODEL:name` in flags is a folder of `MODELS`."""
        flags = re.sub(r"MODEL:(\w+)", lambda found: self.model(found[1]), flags)
        model = "scores" if name == "reward" else "wide" if "4bit" in flags else "llama"
        where = () if "--model_name_or_path" in flags else ("--model_name_or_path", self.model(model))
        return (*where, "--dataset_name", str(self.root / "data" / data), *flags.split())

    def out(self) -> str:
        """A folder for one run."""
        self.count += 1
        return str(self.root / f"run-{self.count}")

    def run(self, ranks: int, name: str, data: str, flags: str, *more: Any, how: tuple = (script,)) -> list[Outcome]:
        """What each rank does with a script: `how[0]`, with the rest of `how` before the arguments of `script`."""
        call = partial(*how, name, self.words(name, data, flags), str(self.root), self.out(), *more)
        return run(call, ranks, init=False, env={"TQDM_DISABLE": "1"})

    def reference(self, *case: str, how: tuple = (script,)) -> Outcome:
        """What a script (name, data, flags) does in one plain process."""
        key = (*case, how)
        if key not in self.references:
            self.references[key] = self.run(1, *case, how=how)[0]
        return self.references[key]

    def parallel(self, name: str, data: str, flags: str, spec: str) -> list[Outcome]:
        """What each rank of the layout does with it."""
        return self.run(axes(spec)["world"], name, data, flags, spec)

    def check(
        self,
        name: str,
        data: str,
        flags: str,
        spec: str,
        metrics: bool = True,
        tolerance: float = 1e-4,
        weights: float = 2e-5,
        also: str = "",
        alone: tuple = (script,),
    ) -> list[Outcome]:
        """Fail with every difference from one process in words; returns what each rank did.

        Args:
            metrics: whether TRL's own metrics are compared too.
            weights: five steps of SGD at a rate of 0.1 or 1 carry on what fp32 rounds in the losses: 1e-5 of gradients
                of size 1.
            also: flags that the ranks alone are given.
            alone: the one process's `how`.
        """
        reference, ranks = (
            self.reference(name, data, flags, how=alone),
            self.parallel(name, data, f"{flags} {also}", spec),
        )
        found = []
        for rank, outcome in enumerate(ranks):
            assert len(outcome.logs) == len(reference.logs)
            for step, logs in enumerate(zip(outcome.logs, reference.logs, strict=True), 1):
                found += [f"rank {rank}: {line} in log {step}" for line in log_differences(*logs, metrics, tolerance)]
        found += key_differences([outcome.gradient_keys for outcome in ranks], reference.gradient_keys)
        none(found + weight_differences(ranks[0].folder, reference.folder, weights))
        return ranks


def log_differences(ours: dict[str, Any], theirs: dict[str, Any], metrics: bool, tolerance: float) -> list[str]:
    """Compare two logs, number by number."""
    names = [key for key in theirs if not any(part in key for part in NOT_COMPARED)]
    if not metrics:
        names = [key for key in names if key in ("loss", "grad_norm", "eval_loss")]
    found = []
    for key in (key for key in names if not tied(key, ours, theirs)):
        if not (gap := abs(ours[key] - theirs[key])) <= tolerance * max(1, abs(theirs[key])):
            found.append(f"{key}: {ours[key]}, one process {theirs[key]} ({gap:.1e})")
    return found


def tied(key: str, *logs: dict[str, Any]) -> bool:
    """Is it an accuracy of margins that rounding alone keeps from zero? Those that are exactly zero are compared."""
    margins = [log.get(key.replace("accuracies", "margins"), 0.0) for log in logs]
    return key.endswith("rewards/accuracies") and 0 < max(map(abs, margins)) <= ROUNDED
