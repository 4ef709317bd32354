"""Tuning of models that look at pictures, read from checkouts: patched forwards, rates by part, files of their own."""

from tests.outside.cases import TRAINER, Case

MOCK = "__import__('tests.outside.stand_ins').outside.stand_ins.stand_for(%s)\n"
FOLDER = "SOURCES/Qwen2-VL-Finetune"
#: A kernel that is for GPUs alone, and forwards of Transformers 4, which are left out.
QWEN = (
    (
        "import os\nimport torch\n",
        f"import os, sys\nsys.path[:0] = ['{FOLDER}/src/train', '{FOLDER}/src', '{FOLDER}']\n"
        f"{MOCK % repr('liger_kernel')}import torch\n",
    ),
    ("        replace_qwen_2_with_mixed_modality_forward()\n", "        pass\n"),
    (
        "from monkey_patch_forward import replace_qwen2_5_with_mixed_modality_forward, "
        "replace_qwen_2_with_mixed_modality_forward\n",
        "",
    ),
    ("from monkey_patch_vision import replace_qwen2_5_vision\n", ""),
    ("model.language_model", "model.model.language_model"),
    ("model.visual", "model.model.visual"),
    ("hasattr(model, ", "hasattr(model.model, "),
)
OTHERS = (
    ("from .dpo_trainer import QwenDPOTrainer\n", ""),
    ("from .grpo_trainer import QwenGRPOTrainer\n", ""),
    ("from .cls_trainer import QwenCLSTrainer\n", ""),
)
#: Which tokens stand for a picture, as Transformers 5 asks.
KINDS = (
    (
        "            'attention_mask': attention_mask,\n        }",
        "            'attention_mask': attention_mask, 'mm_token_type_ids': (input_ids == 515).long(),\n        }",
    ),
)
#: Of an engine that is not here.
ENGINE = (
    ("    from deepspeed import zero\n", ""),
    ("    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus\n", ""),
)
QWEN_RUN = (
    "--model_id ROOT/qwen2_vl_chat --data_path ROOT/captions/llava.json --image_folder ROOT/captions/train "
    "--eval_path ROOT/captions/llava.json --eval_strategy steps --eval_steps 2 --image_resized_width 112 "
    f"--image_resized_height 112 --disable_flash_attn2 True {TRAINER} --max_steps 3 --remove_unused_columns False "
    "--dataloader_drop_last True"
)
ADAPTERS = "--lora_enable True --freeze_llm True --lora_rank 4 --lora_dropout 0 --num_lora_modules -1"
LOOKING = {
    f"Qwen2-VL-Finetune train_sft{more}": Case(
        "Qwen2-VL-Finetune/src/train/train_sft.py",
        f"{QWEN_RUN} {given}",
        edits=QWEN,
        modules=(
            ("src/trainer/__init__.py", OTHERS),
            ("src/dataset/sft_dataset.py", KINDS),
            ("train/train_utils.py", ENGINE),
        ),
    )
    for more, given in {
        "": "--vision_lr 2e-3 --merger_lr 5e-3",
        ", LoRA": f"{ADAPTERS} --save_strategy steps --save_steps 2",
        ", LoRA, eyes": f"{ADAPTERS} --vision_lora True --freeze_vision_tower True --freeze_merger True",
        ", last layers": "--freeze_llm True --freeze_vision_tower True --unfreeze_topk_llm 1 --unfreeze_topk_vision 1",
    }.items()
}
