"""Well-known scripts that tune one language model, each read from a checkout of its repository."""

from tests.outside.cases import TRAINER, Case

#: Names that Transformers and PEFT have under another name now, and numbers for three steps in float32.
ALPACA_LORA = (
    (
        "import os\nimport sys\n",
        "import os\nimport sys\nsys.path.insert(0, 'SOURCES/alpaca-lora')\nos.chdir(sys.path[0])\n",
    ),
    (
        "    prepare_model_for_int8_training,\n",
        "    prepare_model_for_kbit_training as prepare_model_for_int8_training,\n",
    ),
    ("        load_in_8bit=True,\n        torch_dtype=torch.float16,\n", "        dtype=torch.float32,\n"),
    ("device_map=device_map", "device_map=None"),
    ("LlamaTokenizer.from_pretrained", "transformers.AutoTokenizer.from_pretrained"),
    ("warmup_steps=100", "warmup_steps=0, use_cpu=True, disable_tqdm=True, adam_epsilon=1e-3, max_steps=3"),
    ("fp16=True,", ""),
    ("logging_steps=10,", "logging_steps=1,"),
    ("evaluation_strategy", "eval_strategy"),
    ("=200 if", "=2 if"),
    ("save_steps=200", "save_steps=2"),
    (
        "group_by_length=group_by_length",
        "train_sampling_strategy='group_by_length' if group_by_length else 'random'",
    ),
    ('"wandb" if use_wandb else None', '"none"'),
    ("        model = torch.compile(model)\n", "        pass\n"),
    (".shuffle()", ".shuffle(seed=1)"),
    # Processes that share a batch are not counted (docs/idioms.md).
    ('int(os.environ.get("WORLD_SIZE", 1))', '__import__("accelerate").PartialState().num_processes'),
)
#: The tokenizer of ChatGLM, and arguments of Trainer that a file has.
GLM = (
    ("import jieba\n", "jieba = __import__('types').SimpleNamespace(cut=str.split)\n"),
    ("from rouge_chinese import Rouge\n", ""),
    ("rouge = Rouge()", "rouge = __import__('evaluate').load('rouge')"),
    ("scores = rouge.get_scores(' '.join(pred_tokens), ' '.join(label_tokens))", "scores = [{}]"),
    ("metrics_dct = {'rouge-1': [], 'rouge-2': [], 'rouge-l': [], 'bleu-4': []}", "metrics_dct = {'bleu-4': []}"),
    (
        "            sentence_bleu(\n                [label_tokens],\n                pred_tokens,\n                "
        "smoothing_function=SmoothingFunction().method3,\n            )",
        "sum(int(number) for number in pred_ids if number > 3) / 1e3",
    ),
    ("import ruamel.yaml as yaml", "import json, yaml"),
    ("_get_yaml_parser().load(path)", "json.loads(path.read_text().replace('OUTPUT', 'OUT').replace('0.5', 'ROWS'))"),
    ("-> yaml.YAML", ""),
    ("tokenizer.get_command(", "tokenizer.convert_tokens_to_ids(('<mask>', "),
    ("('<mask>', '[gMASK]')", "'<mask>')"),
    ("('<mask>', 'sop')", "'<cls>')"),
    ("('<mask>', '<|user|>')", "'<|im_start|>')"),
    ("('<mask>', '<|observation|>')", "'<|im_end|>')"),
    (
        "tokenizer.build_single_message(\n                    message['role'], '', message['content']\n"
        "                )",
        "tokenizer.encode(message['role'] + ' ' + message['content'])",
    ),
    ("                empty_init=False,\n", ""),
    ("            empty_init=False,\n", ""),
    ("                use_cache=False\n", ""),
    ("            use_cache=False\n", ""),
    (
        '    _sanity_check(\n        train_dataset[0]["input_ids"], train_dataset[0]["labels"], tokenizer\n    )\n',
        "",
    ),
    (
        "return super().__call__(features, return_tensors)",
        "return {k: v for k, v in super().__call__(features, return_tensors).items() if v is not None}",
    ),
    ("tokenizer.decode(pred_ids)", "tokenizer.decode([number for number in pred_ids if number >= 0])"),
    ("tokenizer.decode(label_ids)", "tokenizer.decode([number for number in label_ids if number >= 0])"),
    (
        "AutoTokenizer.from_pretrained(model_dir, trust_remote_code=True)",
        'AutoTokenizer.from_pretrained(model_dir, padding_side="left")',
    ),
    ("    app()", "    app(standalone_mode=False)"),
    ("evaluation_strategy", "eval_strategy"),
    ("list(range(50))", "list(range(11))"),
    ("tokenizer=tokenizer if use_tokenizer else None", "processing_class=tokenizer if use_tokenizer else None"),
)
MESSAGES = "--train_data_path ROOT/dialogues/messages.json --eval_data_path ROOT/dialogues/messages.json"
#: Attention with shifted groups needs kernels of a GPU; what is left is the vocabulary and the adapters.
LONG = (
    ("from llama_attn_replace_sft import replace_llama_attn\n", "replace_llama_attn = lambda *args: None\n"),
    ("from llama_attn_replace import replace_llama_attn\n", "replace_llama_attn = lambda *args: None\n"),
    ("from gptneox_attn_replace import replace_gpt_neox_attn\n", ""),
    ("torch_dtype=torch.bfloat16", "dtype=torch.float32"),
    (
        'config.rope_scaling = {"type": "linear", "factor": scaling_factor}',
        'config.rope_parameters = {"rope_type": "linear", "factor": scaling_factor, "rope_theta": 1e4}',
    ),
    ("if tokenizer.pad_token is None", "if True"),
    ("model=model, tokenizer=tokenizer,", "model=model, processing_class=tokenizer,"),
)
#: Names and sizes of LLaMA's vocabularies, and arguments that Transformers has no more.
CHINESE = (
    ("    is_torch_tpu_available,\n", ""),
    ("is_torch_tpu_available()", "False"),
    ("from transformers.utils import send_example_telemetry\n", "send_example_telemetry = lambda *args: None\n"),
    ("    LlamaTokenizer,\n", ""),
    ("LlamaTokenizer.from_pretrained", "AutoTokenizer.from_pretrained"),
    ('        "use_auth_token": True if model_args.use_auth_token else None,\n', ""),
    ("            use_auth_token=True if model_args.use_auth_token else None,\n", ""),
    ('            from_tf=bool(".ckpt" in model_args.model_name_or_path),\n', ""),
    ("            low_cpu_mem_usage=True\n", ""),
    ("torch_dtype=torch_dtype", "dtype=torch_dtype"),
    ("    if not (\n       (model_vocab_size==32000 and", "    if False and (\n       (model_vocab_size==32000 and"),
    ("    if not ((model_vocab_size==32000", "    if False and ((model_vocab_size==32000"),
    ("        tokenizer=tokenizer,\n", "        processing_class=tokenizer,\n"),
    ('kwargs["tokenizer"]', 'kwargs["processing_class"]'),
    ("{training_args.local_rank}", ""),
    ("training_args.local_rank != -1", "False"),
    ("model.state_dict = (", "_ = ("),  # whose adapters PEFT does not take any more
    ("train_test_split(test_size = data_args.validation_split_percentage)", "train_test_split(test_size=0.3, seed=1)"),
)
DEEPSEEK = (
    ("torch_dtype=torch.bfloat16", "dtype=torch.float32"),
    ("num_proc=32", "num_proc=1"),
    ("model=model, tokenizer=tokenizer,", "model=model, processing_class=tokenizer,"),
)
QLORA = (
    ("    use_cache: Optional[bool]", "    use_cache_of_generation: Optional[bool]"),
    (
        "        load_in_4bit=args.bits == 4,\n        load_in_8bit=args.bits == 8,\n        device_map",
        "        device_map",
    ),
    ("        max_memory=max_memory,\n", ""),
    ("use_auth_token=args.use_auth_token,", ""),
    ("use_auth_token=args.use_auth_token", ""),
    ("device_map=device_map,", ""),
    ("use_fast=False, # Fast", "# Fast"),
    ("tokenizer_type='llama' if 'llama' in args.model_name_or_path else None, #", "#"),
    ("tokenizer._pad_token", "tokenizer.pad_token"),
    ("tokenizer=tokenizer,\n        args=training_args", "processing_class=tokenizer,\n        args=training_args"),
    (
        "if torch.cuda.is_available():\n        n_gpus",
        "n_gpus = 8\n    if torch.cuda.is_available():\n        n_gpus",
    ),
)
#: Not in 4 bits: a token for padding that the tokenizer lacks, and rows drawn by one number.
WHOLE = (
    *QLORA,
    ("quantization_config=BitsAndBytesConfig(", "quantization_config=None and BitsAndBytesConfig("),
    ("tokenizer.pad_token is None", "True"),
    ("if 'llama' in args.model_name_or_path or", "if"),
    ("train_test_split(test_size=0.1)", "train_test_split(test_size=0.1, seed=1)"),
)
QLORA_RUN = (
    "--model_name_or_path ROOT/llama --dataset ROOT/instructions/train.jsonl --dataset_format input-output --bits 32 "
    f"{TRAINER} --max_steps 3 --do_train --do_eval --eval_dataset_size 5 --source_max_len 33 --target_max_len 17 "
    "--warmup_steps 0 --save_strategy steps --save_steps 2 --gradient_accumulation_steps 2 --optim adamw_torch "
    "--lr_scheduler_type constant --max_grad_norm 0.3 --lora_dropout 0 --lora_r 4 --remove_unused_columns false"
)
TUNING = {
    **{
        f"alpaca-lora finetune.py{name}": Case(
            "alpaca-lora/finetune.py",
            "--base_model ROOT/llama --data_path ROOT/instructions/train.json --output_dir OUT --batch_size 16 "
            f"--micro_batch_size ROWS --learning_rate 1e-2 --cutoff_len 257 --val_set_size 5 --lora_dropout 0 {more}",
            edits=ALPACA_LORA,
        )
        for name, more in {"": "", ", lengths": "--group_by_length True --train_on_inputs False"}.items()
    },
    "LongLoRA supervised-fine-tune.py": Case(
        "LongLoRA/supervised-fine-tune.py",
        f"--model_name_or_path ROOT/llama --data_path ROOT/instructions/train.json --model_max_length 257 {TRAINER} "
        "--max_steps 3",
        edits=LONG,
    ),
    "Chinese-LLaMA-Alpaca run_clm_pt_with_peft.py": Case(
        "Chinese-LLaMA-Alpaca/scripts/training/run_clm_pt_with_peft.py",
        "--model_name_or_path ROOT/llama --tokenizer_name_or_path ROOT/wide --dataset_dir ROOT/plain --data_cache_dir "
        f"OUT/cache --block_size 33 --torch_dtype float32 {TRAINER} --max_steps 3 --do_train --do_eval --lora_rank 4 "
        "--lora_dropout 0 --trainable q_proj,down_proj --modules_to_save embed_tokens,lm_head --save_strategy steps "
        "--save_steps 2 --eval_strategy steps --eval_steps 2 --preprocessing_num_workers 1",
        edits=CHINESE,
    ),
    **{
        f"ChatGLM3 finetune_hf.py{name}": Case(
            "ChatGLM3/finetune_demo/finetune_hf.py", f"ROOT/dialogues ROOT/llama ROOT/dialogues/{file}.json", edits=GLM
        )
        for name, file in {"": "glm", ", LoRA": "glm-lora"}.items()
    },
    "DeepSeek-Coder finetune_deepseekcoder.py": Case(
        "DeepSeek-Coder/finetune/finetune_deepseekcoder.py",
        f"--model_name_or_path ROOT/llama --data_path ROOT/instructions/train.json --model_max_length 257 {TRAINER} "
        "--max_steps 3 --gradient_checkpointing true",
        edits=DEEPSEEK,
    ),
    "MiniCPM finetune.py": Case(
        "MiniCPM/finetune/finetune.py",
        f"--model_name_or_path ROOT/chatty {MESSAGES} --model_max_length 49 {TRAINER} --max_steps 3 "
        "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2",
        edits=(
            (
                "tokenizer=tokenizer,\n    )\n\n    trainer.train",
                "processing_class=tokenizer,\n    )\n\n    trainer.train",
            ),
            ("apply_chat_template([message])", "apply_chat_template([message], return_dict=False)"),
        ),
    ),
    "MiniCPM finetune.py, LoRA": Case(
        "MiniCPM/finetune/finetune.py",
        f"--model_name_or_path ROOT/chatty {MESSAGES} --model_max_length 49 {TRAINER} --max_steps 3 --use_lora true "
        "--save_strategy steps --save_steps 2",
        edits=(
            (
                "tokenizer=tokenizer,\n    )\n\n    trainer.train",
                "processing_class=tokenizer,\n    )\n\n    trainer.train",
            ),
            ("apply_chat_template([message])", "apply_chat_template([message], return_dict=False)"),
            ("lora_dropout=0.1", "lora_dropout=0.0"),
        ),
    ),
    "qlora.py": Case(
        "qlora/qlora.py",
        f"--model_name_or_path ROOT/blocks --dataset ROOT/instructions.jsonl --dataset_format input-output {TRAINER} "
        "--do_train --do_eval --max_steps 3 --bits 4 --source_max_len 17 --target_max_len 17 --eval_dataset_size 11 "
        "--lora_dropout 0 --optim adamw_torch --gradient_checkpointing false --eval_strategy steps --eval_steps 3",
        edits=QLORA,
    ),
    "qlora qlora.py, full": Case("qlora/qlora.py", f"{QLORA_RUN} --full_finetune", edits=WHOLE),
    "qlora qlora.py, LoRA": Case("qlora/qlora.py", QLORA_RUN, edits=WHOLE),
    "qlora qlora.py, generated": Case(
        "qlora/qlora.py",
        f"{QLORA_RUN} --full_finetune --predict_with_generate --do_predict --max_new_tokens 5".replace(
            "--do_train --do_eval ", ""
        ),
        edits=WHOLE,
    ),
}
