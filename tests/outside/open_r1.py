"""open-r1's scripts around TRL's trainers, read from a checkout."""

from tests.outside.cases import TRAINER, Case

FOLDER = "open-r1/src/open_r1"
#: Where the package lies, and a helper that TRL has no more.
EDITS = (
    ("import logging\nimport os\n", "import logging\nimport os, sys\nsys.path.insert(0, 'SOURCES/open-r1/src')\n"),
    (", setup_chat_format", ""),
)
RUN = f"--model_name_or_path ROOT/chatty {TRAINER} --max_steps 3 --bf16 false --dtype float32 --seed 3"
GRPO = (
    f"{RUN} --dataset_name ROOT/summaries --dataset_prompt_column document --eval_strategy steps --eval_steps 2 "
    "--num_generations 4 --max_completion_length 9 --max_completion_len 9 --soft_punish_cache 8 --reward_funcs "
)
OPEN_R1 = {
    "open-r1 sft": Case(
        f"{FOLDER}/sft.py",
        f"{RUN} --dataset_name ROOT/chats --max_length 33 --do_eval true --eval_strategy epoch",
        edits=EDITS,
    ),
    "open-r1 sft, packed LoRA": Case(
        f"{FOLDER}/sft.py",
        f"{RUN} --dataset_name ROOT/chats --max_length 33 --packing true --use_peft --lora_target_modules q_proj "
        "down_proj --lora_dropout 0 --gradient_accumulation_steps 2",
        edits=EDITS,
    ),
    "open-r1 grpo, epochs": Case(
        f"{FOLDER}/grpo.py",
        f"{GRPO} soft_overlong_punishment repetition_penalty --max_steps 26 --eval_strategy no",
        edits=EDITS,
    ),
    "open-r1 grpo": Case(f"{FOLDER}/grpo.py", f"{GRPO} soft_overlong_punishment repetition_penalty", edits=EDITS),
    "open-r1 grpo, LoRA": Case(
        f"{FOLDER}/grpo.py",
        f"{GRPO} soft_overlong_punishment repetition_penalty --beta 0.1 --use_peft --lora_dropout 0 "
        "--lora_target_modules q_proj down_proj",
        edits=EDITS,
    ),
}
