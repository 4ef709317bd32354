"""TRL's examples, read from a checkout."""

from tests.outside.cases import TRAINER, Case

FOLDER = "trl/examples/scripts"
RUN = f"{TRAINER} --max_steps 3 --bf16 false --dtype float32 --eval_strategy steps --eval_steps 2"
SEEING = (
    f"--model_name_or_path ROOT/qwen2_vl_chat {RUN} --dataloader_drop_last true"  # examples that fill up hold pictures
)
ADAPTERS = "--use_peft --lora_target_modules q_proj down_proj --lora_dropout 0"
TRL_EXAMPLES = {
    "trl sft_vlm": Case(f"{FOLDER}/sft_vlm.py", f"{SEEING} --dataset_name ROOT/looks"),
    "trl sft_vlm, LoRA": Case(
        f"{FOLDER}/sft_vlm.py",
        f"{SEEING} --dataset_name ROOT/looks {ADAPTERS} --gradient_accumulation_steps 2 --gradient_checkpointing true",
    ),
    "trl dpo_vlm": Case(f"{FOLDER}/dpo_vlm.py", f"{SEEING} --dataset_name ROOT/looked"),
    "trl dpo_vlm, LoRA": Case(f"{FOLDER}/dpo_vlm.py", f"{SEEING} --dataset_name ROOT/looked {ADAPTERS}"),
}
