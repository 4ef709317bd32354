"""TRL's experimental trainers as its example scripts make them, with flags, for `trl_scripts.script` to run.

TRL installs no script for them; `make_parser` and `main` of a `Script` are those that such a script would have.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from tests import rollouts

#: Name of a module under `trl.experimental` -> how the names of its classes begin.
KINDS = {
    "cpo": "CPO",
    "orpo": "ORPO",
    "tpo": "TPO",
    "gkd": "GKD",
    "gold": "GOLD",
    "iw_opd": "IWOPD",
    "gmpo": "GMPO",
    "online_dpo": "OnlineDPO",
    "sdft": "SDFT",
    "sdpo": "SDPO",
}
#: Those that draw tokens.
GENERATING = ("gmpo", "gkd", "gold", "iw_opd", "online_dpo", "sdft", "sdpo")
#: Those that ask what an answer is worth.
REWARDED = ("gmpo", "online_dpo", "sdpo")
#: How many answers they draw in a call for each prompt, those of all prompts after one another.
ANSWERS = {"online_dpo": 2}
#: Those of them that train on a last batch of fewer rows.
RAGGED = ("gkd",)


@dataclass
class TeacherArguments(ScriptArguments):
    """The folders of a teacher and of a model that rewards, for trainers that have one."""

    teacher: str | None = None
    reward_model: str | None = None


@dataclass(frozen=True)
class Script:
    """The script of one trainer."""

    name: str

    def find_class(self, suffix: str) -> Any:
        """Return its `Trainer` or `Config`."""
        return getattr(importlib.import_module(f"trl.experimental.{self.name}"), KINDS[self.name] + suffix)

    def make_parser(self) -> TrlParser:
        """For the arguments of script, training and model."""
        return TrlParser((TeacherArguments, self.find_class("Config"), ModelConfig))

    def main(self, script: TeacherArguments, arguments: Any, model_arguments: ModelConfig) -> None:
        """Train and save, as the examples do."""
        model = AutoModelForCausalLM.from_pretrained(model_arguments.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_arguments.model_name_or_path)
        data = load_dataset(script.dataset_name)
        given = {"processing_class": tokenizer, "peft_config": get_peft_config(model_arguments)}
        if self.name in REWARDED:
            given["reward_funcs"] = [script.reward_model or rollouts.reward, rollouts.second_reward]
        if script.teacher:
            given["teacher_model"] = AutoModelForCausalLM.from_pretrained(script.teacher)
        trainer = self.find_class("Trainer")(
            model=model,
            args=arguments,
            train_dataset=data[script.dataset_train_split],
            eval_dataset=data[script.dataset_test_split] if arguments.eval_strategy != "no" else None,
            **given,
        )
        trainer.train()
        trainer.save_model(arguments.output_dir)
