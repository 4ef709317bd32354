"""Scripts of other projects that run as they are: where each lies in a checkout, and its arguments."""

from pathlib import Path

from tests.outside.aligning import ALIGNING as PREFERENCES
from tests.outside.axolotl import AXOLOTL
from tests.outside.borrowed import BORROWED
from tests.outside.cases import TRAINER, Case
from tests.outside.chronos import CHRONOS
from tests.outside.colpali import COLPALI
from tests.outside.course import COURSE
from tests.outside.diffusion import DIFFUSION
from tests.outside.editing import EDITING
from tests.outside.gliner import GLINER
from tests.outside.inferring import INFERRING
from tests.outside.latent import LATENT
from tests.outside.less import LESS
from tests.outside.llama_factory import FACTORY
from tests.outside.lmflow import LMFLOW
from tests.outside.looking import LOOKING
from tests.outside.loops import LOOPS
from tests.outside.methods import METHODS
from tests.outside.native import NATIVE
from tests.outside.notebooks import NOTEBOOKS
from tests.outside.open_r1 import OPEN_R1
from tests.outside.own_trainers import OWN_TRAINERS
from tests.outside.peft_examples import PEFT
from tests.outside.private import PRIVATE
from tests.outside.robots import ROBOTS
from tests.outside.trl_examples import TRL_EXAMPLES
from tests.outside.tuning import TUNING
from tests.outside.unlike import UNLIKE

SPECS = ("tp=2", "pp=2", "dp_shard=2", "dp_shard=2,zero_stage=1", "cp=2")

PYTORCH = "transformers/examples/pytorch"
RUN = f"{TRAINER} --do_train --do_eval --max_steps 3"
MEDIA = f"{RUN} --remove_unused_columns false"
#: Loops' schedules count steps of all processes. Sets are of 32: a loop of its own trains on full batches.
LOOP = (
    "--output_dir OUT --per_device_train_batch_size ROWS --per_device_eval_batch_size ROWS --learning_rate 1e-2 "
    "--lr_scheduler_type constant --max_train_steps 3 --seed 1"
)
#: Of loops that hand their own to AdamW: with 1e-8 it turns a gradient next to zero into a step of either sign.
EPSILON = "--adam_epsilon 1e-3"


def json_files(kind: str, train: str) -> str:
    """Data files of a script that knows no .jsonl."""
    return f"--train_file ROOT/{kind}/{train}.json --validation_file ROOT/{kind}/validation.json"


#: A name that these scripts use and do not import.
OPTIONAL = (
    (
        "import logging\n",
        "import logging\nfrom typing import Any, Optional, Union\nfrom transformers import AutoFeatureExtractor, "
        "AutoTokenizer\n",
    ),
    ("if os.path.isdir(model_args.model_name_or_path):", "if False:"),  # a local model is no checkpoint
    ("config.tokenizer_class", "None"),  # which Transformers 5 has no more
)
OLD_NAMES = (("DistributedType.TPU", "DistributedType.XLA"),)
#: Statistics that the script asks of a module, which has none: of the whole matrix (docs/idioms.md).
WHOLE = "__import__('hf_parallel').full_tensor(original_embeddings.weight).detach()"
EMBEDDINGS = (
    (
        "mean = original_embeddings.mean(dim=0)",
        f"weights = {WHOLE}; mean = weights.mean(dim=0)",
    ),
    ("n = original_embeddings.size()[0]", "n = len(weights)"),
    ("((original_embeddings - mean).T @ (original_embeddings - mean))", "((weights - mean).T @ (weights - mean))"),
)
#: A mask drawn by its picture, not by the count of pictures that this process has seen.
MASKS = (
    (
        "[mask_generator() for i in range(len(examples[image_column_name]))]",
        "[__import__('tests.outside.stand_ins').outside.stand_ins.drawn_by(x, mask_generator) "
        "for x in examples[image_column_name]]",
    ),
)
SPEECH = "--dataset_name ROOT/media/sounds-train --eval_split_name validation"
TRANSFORMERS = {
    "speech-recognition/run_speech_recognition_ctc": Case(
        f"{PYTORCH}/speech-recognition/run_speech_recognition_ctc.py",
        f"{SPEECH} --train_split_name train --model_name_or_path ROOT/wav2vec2 --text_column_name text "
        f"--chars_to_ignore , ? --layerdrop 0 --mask_time_prob 0 {RUN}",
        edits=OPTIONAL,
    ),
    "speech-recognition/run_speech_recognition_seq2seq": Case(
        f"{PYTORCH}/speech-recognition/run_speech_recognition_seq2seq.py",
        f"{SPEECH} --model_name_or_path ROOT/whisper --text_column_name text {RUN} --freeze_feature_encoder false "
        "--predict_with_generate --generation_max_length 12 --generation_num_beams 1",
        edits=OPTIONAL,
    ),
    "audio-classification/run_audio_classification": Case(
        f"{PYTORCH}/audio-classification/run_audio_classification.py",
        f"{SPEECH} --model_name_or_path ROOT/wav2vec2-classes --max_length_seconds 20 {MEDIA}",
    ),
    "speech-pretraining/run_wav2vec2_pretraining_no_trainer": Case(
        f"{PYTORCH}/speech-pretraining/run_wav2vec2_pretraining_no_trainer.py",
        "--dataset_name ROOT/media/sounds-full --dataset_config_names clean --dataset_split_names train "
        "--validation_split_percentage 35 --model_name_or_path ROOT/wav2vec2-pretraining --max_duration_in_seconds "
        "1 --min_duration_in_seconds 0 "
        f"{LOOP} --logging_steps 1 --saving_steps 100 --mask_time_prob 0.3 --mask_time_length 2 {EPSILON}",
        edits=(("import aiohttp\n", ""), ("aiohttp.ClientTimeout(total=60 * 60)", "3600")),
    ),
    "image-classification/run_image_classification": Case(
        f"{PYTORCH}/image-classification/run_image_classification.py",
        f"--dataset_name ROOT/media/classes-train --model_name_or_path ROOT/vit {MEDIA}",
    ),
    "image-classification/run_image_classification_no_trainer": Case(
        f"{PYTORCH}/image-classification/run_image_classification_no_trainer.py",
        f"--dataset_name ROOT/media/classes-full --model_name_or_path ROOT/vit {LOOP}",
    ),
    "object-detection/run_object_detection": Case(
        f"{PYTORCH}/object-detection/run_object_detection.py",
        f"--dataset_name ROOT/media/boxes-train --model_name_or_path ROOT/yolos {MEDIA} --image_square_size 32 "
        "--eval_do_concat_batches false",
    ),
    "object-detection/run_object_detection, DETR": Case(
        f"{PYTORCH}/object-detection/run_object_detection.py",
        f"--dataset_name ROOT/media/boxes-train --model_name_or_path ROOT/detr {MEDIA} --image_square_size 32 "
        "--eval_do_concat_batches false",
    ),
    "object-detection/run_object_detection_no_trainer": Case(
        f"{PYTORCH}/object-detection/run_object_detection_no_trainer.py",
        f"--dataset_name ROOT/media/boxes-full --model_name_or_path ROOT/yolos {LOOP} --image_square_size 32 "
        "--dataloader_num_workers 0",
    ),
    "semantic-segmentation/run_semantic_segmentation": Case(
        f"{PYTORCH}/semantic-segmentation/run_semantic_segmentation.py",
        f"--dataset_name ROOT/media/segments-train --model_name_or_path ROOT/segformer {MEDIA}",
    ),
    "semantic-segmentation/run_semantic_segmentation_no_trainer": Case(
        f"{PYTORCH}/semantic-segmentation/run_semantic_segmentation_no_trainer.py",
        f"--dataset_name ROOT/media/segments-full --model_name_or_path ROOT/segformer {LOOP} {EPSILON}",
    ),
    "instance-segmentation/run_instance_segmentation": Case(
        f"{PYTORCH}/instance-segmentation/run_instance_segmentation.py",
        f"--dataset_name ROOT/media/instances-train --model_name_or_path ROOT/mask2former "
        f"{MEDIA.replace('--do_eval', '')} --image_height 32 "
        "--image_width 32",
    ),
    "instance-segmentation/run_instance_segmentation_no_trainer": Case(
        f"{PYTORCH}/instance-segmentation/run_instance_segmentation_no_trainer.py",
        f"--dataset_name ROOT/media/instances-full --model_name_or_path ROOT/mask2former {LOOP} --image_height 32 "
        "--image_width 32 --dataloader_num_workers 0",
        edits=(('"persistent_workers": True', '"persistent_workers": False'),),
    ),
    "contrastive-image-text/run_clip": Case(
        f"{PYTORCH}/contrastive-image-text/run_clip.py",
        "--train_file ROOT/captions/train/train.json --validation_file ROOT/captions/train/validation.json "
        f"--model_name_or_path ROOT/clip {MEDIA} --max_seq_length 24",
    ),
    "image-pretraining/run_mae": Case(
        f"{PYTORCH}/image-pretraining/run_mae.py",
        f"--dataset_name ROOT/media/classes-train --model_name_or_path ROOT/mae {MEDIA} --base_learning_rate 1e-2 "
        f"--norm_pix_loss false",
    ),
    "image-pretraining/run_mim": Case(
        f"{PYTORCH}/image-pretraining/run_mim.py",
        "--dataset_name ROOT/media/classes-train --model_name_or_path ROOT/vit-masked --mask_patch_size 16 "
        f"--model_type vit {MEDIA}",
        edits=MASKS,
    ),
    "image-pretraining/run_mim_no_trainer": Case(
        f"{PYTORCH}/image-pretraining/run_mim_no_trainer.py",
        "--dataset_name ROOT/media/classes-full --model_name_or_path ROOT/vit-masked --mask_patch_size 16 "
        f"--model_type vit {LOOP}",
        edits=(*MASKS, *OLD_NAMES),
    ),
    "multiple-choice/run_swag": Case(
        f"{PYTORCH}/multiple-choice/run_swag.py",
        f"{json_files('endings', 'train')} --model_name_or_path ROOT/bert --max_seq_length 33 {RUN}",
    ),
    "multiple-choice/run_swag_no_trainer": Case(
        f"{PYTORCH}/multiple-choice/run_swag_no_trainer.py",
        f"{json_files('endings', 'full')} --model_name_or_path ROOT/bert --max_seq_length 33 {LOOP}",
    ),
    "token-classification/run_ner": Case(
        f"{PYTORCH}/token-classification/run_ner.py",
        f"{json_files('names', 'train')} --model_name_or_path ROOT/bert --max_seq_length 33 {RUN}",
    ),
    "token-classification/run_ner, decoder": Case(
        f"{PYTORCH}/token-classification/run_ner.py",
        f"{json_files('names', 'train')} --model_name_or_path ROOT/tagger --max_seq_length 33 {RUN}",
    ),
    "token-classification/run_ner_no_trainer": Case(
        f"{PYTORCH}/token-classification/run_ner_no_trainer.py",
        f"{json_files('names', 'full')} --model_name_or_path ROOT/bert --max_length 33 {LOOP}",
    ),
    "token-classification/run_ner_no_trainer, decoder": Case(
        f"{PYTORCH}/token-classification/run_ner_no_trainer.py",
        f"{json_files('names', 'full')} --model_name_or_path ROOT/tagger --max_length 33 {LOOP}",
    ),
    "language-modeling/run_plm": Case(
        f"{PYTORCH}/language-modeling/run_plm.py",
        f"{json_files('texts', 'train')} --model_name_or_path ROOT/xlnet --max_seq_length 32 {RUN}",
        edits=(("processing_classtokenizer=", "processing_class="),),
    ),
    "language-modeling/run_fim": Case(
        f"{PYTORCH}/language-modeling/run_fim.py",
        f"{json_files('texts', 'train')} --model_name_or_path ROOT/filling --block_size 33 --overwrite_cache {RUN}",
        edits=EMBEDDINGS,
    ),
    "language-modeling/run_fim_no_trainer": Case(
        f"{PYTORCH}/language-modeling/run_fim_no_trainer.py",
        f"{json_files('texts', 'full')} --model_name_or_path ROOT/filling --block_size 33 --overwrite_cache {LOOP}",
        edits=(*OLD_NAMES, *EMBEDDINGS, ("import Repository, create_repo", "import create_repo")),
    ),
    "language-modeling/run_clm": Case(
        f"{PYTORCH}/language-modeling/run_clm.py",
        f"{json_files('texts', 'train')} --model_name_or_path ROOT/llama --block_size 33 {RUN}",
    ),
    "language-modeling/run_mlm": Case(
        f"{PYTORCH}/language-modeling/run_mlm.py",
        f"{json_files('texts', 'train')} --model_name_or_path ROOT/bert --line_by_line --max_seq_length 33 {RUN}",
    ),
    "language-modeling/run_mlm_no_trainer": Case(
        f"{PYTORCH}/language-modeling/run_mlm_no_trainer.py",
        f"{json_files('texts', 'full')} --model_name_or_path ROOT/bert --line_by_line True --max_seq_length 33 {LOOP}",
        edits=OLD_NAMES,
    ),
    "text-classification/run_glue_no_trainer": Case(
        f"{PYTORCH}/text-classification/run_glue_no_trainer.py",
        f"{json_files('pairs', 'full')} --model_name_or_path ROOT/llama {LOOP}",
    ),
    "text-classification/run_classification": Case(
        f"{PYTORCH}/text-classification/run_classification.py",
        f"{json_files('pairs', 'train')} --model_name_or_path ROOT/llama --text_column_names sentence1,sentence2 "
        f"--label_column_name label --max_seq_length 33 --shuffle_train_dataset {RUN}",
    ),
    "summarization/run_summarization": Case(
        f"{PYTORCH}/summarization/run_summarization.py",
        f"{json_files('summaries', 'train')} --model_name_or_path ROOT/t5 --source_prefix summarize: "
        f"--predict_with_generate --max_source_length 40 --max_target_length 12 --num_beams 2 {RUN}",
    ),
    "summarization/run_summarization_no_trainer": Case(
        f"{PYTORCH}/summarization/run_summarization_no_trainer.py",
        f"{json_files('summaries', 'full')} --model_name_or_path ROOT/t5 --source_prefix summarize: "
        f"--max_source_length 40 --max_target_length 12 --num_beams 2 {LOOP}",
    ),
    "question-answering/run_qa_no_trainer": Case(
        f"{PYTORCH}/question-answering/run_qa_no_trainer.py",
        f"{json_files('squad', 'full')} --model_name_or_path ROOT/bert --max_seq_length 48 --doc_stride 16 {LOOP}",
    ),
    "question-answering/run_seq2seq_qa": Case(
        f"{PYTORCH}/question-answering/run_seq2seq_qa.py",
        f"{json_files('squad', 'train')} --model_name_or_path ROOT/t5 --max_seq_length 48 --doc_stride 16 "
        f"--max_answer_length 8 --predict_with_generate --context_column context --question_column question "
        f"--answer_column answers {RUN}",
    ),
    "translation/run_translation": Case(
        f"{PYTORCH}/translation/run_translation.py",
        f"{json_files('translations', 'train')} --model_name_or_path ROOT/t5 --source_lang en --target_lang de "
        f"--source_prefix translate: --predict_with_generate --max_source_length 40 --max_target_length 12 {RUN}",
    ),
    "translation/run_translation_no_trainer": Case(
        f"{PYTORCH}/translation/run_translation_no_trainer.py",
        f"{json_files('translations', 'full')} --model_name_or_path ROOT/t5 --source_lang en --target_lang de "
        f"--source_prefix translate: --num_beams 1 --predict_with_generate True "
        f"--max_source_length 40 --max_target_length 12 {LOOP}",
    ),
}

#: What accelerate's examples have written into them: a model, a data set, rows per process, rates, steps of warm-up.
FIXED = (
    ("bert-base-cased", "ROOT/scores"),
    ("HuggingFaceTB/SmolLM-360M", "ROOT/llama"),
    ('load_dataset("nyu-mll/glue", "mrpc")', 'load_dataset("json", data_files=PAIRS)'),
    (
        "EVAL_BATCH_SIZE = 32",
        "EVAL_BATCH_SIZE = ROWS\n"
        "PAIRS = {'train': 'ROOT/pairs/full.jsonl', 'validation': 'ROOT/pairs/validation.jsonl'}\n"
        "TEXTS = {'train': 'ROOT/texts/full.jsonl', 'validation': 'ROOT/texts/validation.jsonl'}",
    ),
    ('load_dataset("Salesforce/wikitext", "wikitext-2-v1")', 'load_dataset("json", data_files=TEXTS)'),
    ("num_warmup_steps=100", "num_warmup_steps=0"),
    ('"lr": 2e-5', '"lr": 1e-2'),
    ('"num_epochs": 3', '"num_epochs": 2'),
    ('"batch_size": 16', '"batch_size": ROWS'),
    ('"batch_size": 256', '"batch_size": ROWS'),
    ("max_training_samples=500", "max_training_samples=32"),
    ("batch_size: int = 16,", "batch_size: int = ROWS,"),
    ("self.process = psutil.Process()", "self.process, self.begin, self.end, self.peak = psutil.Process(), 0, 0, 0"),
)
FEATURES = {
    "automatic_gradient_accumulation": "",
    "checkpointing": "--checkpointing_steps 3 --output_dir OUT",
    "cross_validation": "--num_folds 2",
    "ddp_comm_hook": "--ddp_comm_hook fp16",
    "ddp_comm_hook, no hook": "--ddp_comm_hook no",
    "early_stopping": "",
    "fsdp_with_peak_mem_tracking": "--model_name_or_path ROOT/scores --output_dir OUT",
    "gradient_accumulation": "--gradient_accumulation_steps 2",
    "gradient_accumulation_for_autoregressive_models": "--gradient_accumulation_steps 2 --per_device_batch_size ROWS",
    "local_sgd": "--gradient_accumulation_steps 1 --local_sgd_steps 2",
    "memory": "",
    "multi_process_metrics": "",
    "profiler": "--record_shapes",
    "schedule_free": "",
    "tracking": "--with_tracking --project_dir OUT",
    "deepspeed_with_config_support": "--model_name_or_path ROOT/llama --train_file ROOT/texts/full.json "
    "--validation_file "
    f"ROOT/texts/validation.json --block_size 33 {LOOP}",
    "megatron_lm_gpt_pretraining": "--model_name_or_path ROOT/gpt2 --train_file ROOT/texts/full.json "
    "--validation_file "
    f"ROOT/texts/validation.json --block_size 33 {LOOP}",
}
ACCELERATE = {
    f"by_feature/{name}": Case(
        f"accelerate/examples/by_feature/{name.partition(',')[0]}.py",
        arguments if "LOOP" in arguments or "_file" in arguments else f"{arguments} --cpu",
        edits=() if "_file" in arguments else FIXED,
    )
    for name, arguments in FEATURES.items()
}
ENCODERS = tuple((old, "ROOT/bert" if new == "ROOT/scores" else new) for old, new in FIXED)
ACCELERATE["by_feature/checkpointing, BERT"] = Case(
    "accelerate/examples/by_feature/checkpointing.py",
    "--checkpointing_steps epoch --output_dir OUT --cpu",
    edits=ENCODERS,
)
ACCELERATE["nd_parallel_trainer"] = Case(
    "accelerate/examples/torch_native_parallelism/nd_parallel_trainer.py", "--model-name ROOT/llama"
)

ALIGN = f"{TRAINER} --max_steps 2 --model_name_or_path ROOT/wide --bf16 false --dtype float32"
TEACHER = f"--teacher_model_name_or_path ROOT/chatty {ALIGN.replace('ROOT/wide', 'ROOT/chatty')}"
TRL = {
    "trl cpo": f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}",
    "trl orpo": f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}",
    "trl tpo": f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}",
    "trl gkd": f"--dataset_name ROOT/chats --max_new_tokens 4 {TEACHER}",
    "trl online_dpo": f"--dataset_name ROOT/prompts --reward_model_path ROOT/scores --max_new_tokens 4 {ALIGN}",
    "trl nash_md": f"--dataset_name ROOT/prompts --reward_model_path ROOT/scores --max_new_tokens 4 {ALIGN}",
    "trl xpo": f"--dataset_name ROOT/prompts --reward_model_path ROOT/scores --max_new_tokens 4 {ALIGN}",
    "trl prm": f"--dataset_name ROOT/steps {ALIGN}",
    "trl distillation": f"--dataset_name ROOT/prompts --max_completion_length 5 {TEACHER}",
}
ALIGNING = {
    name: Case(f"trl/examples/scripts/{name.removeprefix('trl ')}.py", arguments) for name, arguments in TRL.items()
}
OURS = Path(__file__).parent / "scripts"
LOSSES = [
    "CosineSimilarityLoss",
    "CoSENTLoss",
    "AnglELoss",
    "ContrastiveLoss",
    "OnlineContrastiveLoss",
    "SoftmaxLoss",
    "BatchAllTripletLoss",
    "BatchHardTripletLoss",
    "BatchHardSoftMarginTripletLoss",
    "BatchSemiHardTripletLoss",
    "TripletLoss",
    "MSELoss",
    "EmbedDistillLoss",
    "MarginMSELoss",
    "DistillKLDivLoss",
    "DenoisingAutoEncoderLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "GISTEmbedLoss",
    "CachedGISTEmbedLoss",
    "MegaBatchMarginLoss",
    "MatryoshkaLoss",
    "Matryoshka2dLoss",
    "AdaptiveLayerLoss",
    "GlobalOrthogonalRegularizationLoss",
]
SENTENCES = {
    f"sentence-transformers {name}": Case(
        str(OURS / "sentence_losses.py"),
        f"--model_name_or_path ROOT/bert --train_file ROOT/pairs/full.jsonl --validation_file "
        f"ROOT/pairs/validation.jsonl {TRAINER} --max_steps 2 --dataloader_drop_last true --loss {name}",
        needs=("sentence_transformers",),
    )
    for name in LOSSES
}
RERANKING = [
    *("BinaryCrossEntropyLoss", "CrossEntropyLoss", "MultipleNegativesRankingLoss", "LambdaLoss", "ListNetLoss"),
    *("CachedMultipleNegativesRankingLoss", "ListMLELoss", "PListMLELoss", "RankNetLoss", "ADRMSELoss"),
    *("MarginMSELoss", "MSELoss", "SpladeLoss", "CachedSpladeLoss", "CSRLoss", "SparseCosineSimilarityLoss"),
    *("SparseCoSENTLoss", "SparseAnglELoss", "SparseMarginMSELoss", "SparseDistillKLDivLoss", "SparseTripletLoss"),
]
SENTENCES |= {
    f"reranking, {name}": Case(
        str(OURS / "rerankers.py"),
        "--model_name_or_path ROOT/bert --train_file ROOT/pairs/full.jsonl --validation_file "
        f"ROOT/pairs/validation.jsonl {TRAINER} --max_steps 2 --dataloader_drop_last true --loss {name}",
        needs=("sentence_transformers",),
    )
    for name in RERANKING
}
FEW_SHOT = "--model ROOT/bert --train_file ROOT/pairs/train.jsonl --validation_file ROOT/pairs/validation.jsonl"
OTHERS = {
    "setfit quick start": Case(str(OURS / "few_shot.py"), f"{FEW_SHOT} --output_dir OUT --batch_size ROWS"),
    "setfit, a head that trains": Case(
        str(OURS / "few_shot.py"), f"{FEW_SHOT} --output_dir OUT --batch_size ROWS --differentiable"
    ),
    "torch's own DDP (as nanoVLM)": Case(str(OURS / "own_replicas.py"), "--model ROOT/llama --output_dir OUT"),
}
for trained, more in {"projector": "--tune_mm_mlp_adapter True --version plain", "all": "--version plain"}.items():
    OTHERS[f"LLaVA train.py, {trained}"] = Case(
        "LLaVA/llava/train/train.py",
        "--model_name_or_path ROOT/llama --vision_tower ROOT/clip --data_path ROOT/captions/llava.json --image_folder "
        f"ROOT/captions/train --mm_vision_select_layer -2 --mm_use_im_patch_token False --model_max_length 48 "
        f"{TRAINER} "
        f"--max_steps 3 --mm_projector_type mlp2x_gelu {more}",
    )
#: A chat template, which the handbook's scripts take from a helper that TRL has no more.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
)
HANDBOOK = (
    ("import logging\n", "import logging\nimport sys\nsys.path.insert(0, 'SOURCES/alignment-handbook/src')\n"),
    (", setup_chat_format", ""),
    (
        'model, tokenizer = setup_chat_format(model, tokenizer, format="chatml")',
        f'tokenizer.chat_template = "{CHATML}"',
    ),
)
TUNE = f"{TRAINER} --max_steps 3 --bf16 false --dtype float32 --eval_strategy epoch"
OTHERS["alignment-handbook sft"] = Case(
    "alignment-handbook/scripts/sft.py",
    f"--model_name_or_path ROOT/wide --dataset_name ROOT/chats --max_length 33 --do_eval {TUNE}",
    edits=HANDBOOK,
)
OTHERS["alignment-handbook dpo"] = Case(
    "alignment-handbook/scripts/dpo.py",
    f"--model_name_or_path ROOT/wide --dataset_name ROOT/preferences --max_length 33 {TUNE}",
    edits=HANDBOOK,
)
#: SimPO's trainer stands on TRL 0.9: names that moved, a method that Trainer uses itself now, two new arguments.
SIMPO = (
    ("from trl.trainer import CPOTrainer\n", ""),
    (
        "from trl.import_utils import is_peft_available, is_wandb_available",
        "is_peft_available = lambda: True\n"
        "is_wandb_available = lambda: False\nfrom trl.trainer.utils import disable_dropout_in_model",
    ),
    (
        "from trl.trainer.utils import (\n    DPODataCollatorWithPadding,\n    disable_dropout_in_model,\n"
        "    pad_to_length,\n    peft_module_casting_to_bf16,\n    trl_sanitze_kwargs_for_tagging,\n)",
        "from trl.experimental.utils import DPODataCollatorWithPadding, pad_to_length",
    ),
    ("from transformers.utils import is_torch_fx_proxy\n", ""),
    ("                label_pad_token_id=args.label_pad_token_id,\n                is_enc", "                is_enc"),
    (
        "            tokenizer=tokenizer,\n            model_init",
        "            processing_class=tokenizer,\n            model_init",
    ),
    (
        "        return_outputs=False,\n    ) ->",
        "        return_outputs=False,\n        num_items_in_batch=None,\n    ) ->",
    ),
    ("get_batch_samples", "get_policy_samples"),
    ('self.store_metrics(metrics, train_eval="train")', "pass"),  # means of a process, which it logs as they are
    ('self.store_metrics(metrics, train_eval="eval")', "pass"),
    ("def log(self, logs: Dict[str, float])", "def log(self, logs: Dict[str, float], *more)"),
    ("return super().log(logs)", "return super().log(logs, *more)"),
    (
        "        return super().push_to_hub(commit_message=commit_message, blocking=blocking, **kwargs)",
        "        return super().push_to_hub(commit_message=commit_message, blocking=blocking, **kwargs)\n\n\n"
        "from datasets import load_dataset\nfrom transformers import AutoTokenizer, HfArgumentParser, set_seed\n"
        "(args,) = HfArgumentParser(SimPOConfig).parse_args_into_dataclasses()\nset_seed(args.seed)\n"
        "rows = load_dataset('ROOT/preferences')\ntokenizer = AutoTokenizer.from_pretrained('ROOT/wide')\n"
        "tokenizer.bos_token = '<cls>'\n"
        "trainer = SimPOTrainer(AutoModelForCausalLM.from_pretrained('ROOT/wide'), args=args, "
        "train_dataset=rows['train'], eval_dataset=rows['test'], tokenizer=tokenizer)\n"
        "trainer.train()\ntrainer.evaluate()\ntrainer.save_model(args.output_dir)\n",
    ),
)
for weight in (0.0, 0.3):
    OTHERS[f"SimPO's trainer{', sft_weight' if weight else ''}"] = Case(
        "SimPO/scripts/simpo_trainer.py",
        f"--max_length 48 --max_prompt_length 17 --sft_weight {weight} --eval_strategy epoch --max_steps 3 {TRAINER}",
        edits=SIMPO,
    )
OTHERS["MeZO's methods"] = Case(
    str(OURS / "zeroth_order.py"),
    "--model_name_or_path ROOT/llama --train_file ROOT/texts/full.json --methods "
    f"SOURCES/MeZO/large_models/trainer.py --max_steps 3 --lr_scheduler_type constant {TRAINER}",
)
REWARDS = f"{TRAINER} --max_steps 3 --max_length 33 --bf16 false --dtype float32 --eval_strategy epoch"
ALIGNING["trl reward_modeling"] = Case(
    "trl/examples/scripts/reward_modeling.py",
    f"--model_name_or_path ROOT/wide --dataset_name ROOT/preferences {REWARDS}",
)
#: Whisper's own tokenizer and its time stamps, names that are gone, a tracker of predictions that is not here.
DISTIL = (
    ("WhisperTokenizerFast.from_pretrained", "transformers.AutoTokenizer.from_pretrained"),
    ("    tokenizer.add_tokens(timestamps)\n", ""),
    ("tokenizer.timestamp_ids()", "[]"),
    ("EnglishTextNormalizer(tokenizer.english_spelling_normalizer)", "BasicTextNormalizer()"),
    (", decode_with_timestamps=return_timestamps", ""),
    (
        "processor = WhisperProcessor.from_pretrained(training_args.output_dir)",
        "processor = __import__('types').SimpleNamespace(feature_extractor=feature_extractor, tokenizer=tokenizer)",
    ),
    ("        log_with=training_args.report_to,\n", ""),
    ('wandb_tracker = accelerator.get_tracker("wandb")', "return"),
    ("low_cpu_mem_usage=True,\n        torch_dtype=teacher_dtype", "dtype=teacher_dtype"),
    ("        low_cpu_mem_usage=True,\n", ""),
    ("training_args.warmup_steps * accelerator", "0 * accelerator"),
    ("training_args.fp16", "False"),
    ("training_args.hub_token", "None"),
    ("    accelerator.end_training()\n", ""),  # it has saved
)
for shared in ("", ", shared encoder"):
    OTHERS[f"distil-whisper run_distillation{shared}"] = Case(
        "distil-whisper/training/run_distillation.py",
        "--model_name_or_path ROOT/whisper --teacher_model_name_or_path ROOT/whisper-teacher "
        "--train_dataset_name ROOT/media/sounds-full --train_dataset_config_name clean --train_split_name train "
        "--eval_split_name validation --text_column_name text --eval_text_column_name text --use_pseudo_labels false "
        "--streaming false --preprocessing_num_workers 1 --max_duration_in_seconds 30 --max_label_length 12 "
        "--timestamp_probability 0 --condition_on_prev_probability 0 --dtype float32 --do_train --do_eval "
        "--predict_with_generate --generation_num_beams 1 --output_dir OUT --use_cpu "
        "--per_device_train_batch_size ROWS --per_device_eval_batch_size ROWS --learning_rate 1e-2 "
        "--adam_epsilon 1e-3 --lr_scheduler_type constant --max_steps 3 --eval_steps 3 --save_steps 3 "
        "--logging_steps 1" + (" --freeze_encoder" if shared else ""),
        edits=DISTIL,
    )
#: Libraries of open-instruct that are not here and that its loop does not need, and numbers written into it.
ABSENT = "'deepspeed', 'beaker', 'ray', 'wandb', 'olmo_core', 'vllm', 'tiktoken', 'open_instruct.ground_truth_utils'"
INSTRUCT = (
    (
        "import contextlib\nimport os\n",
        "import contextlib\nimport os\nimport sys\nsys.path.insert(0, 'SOURCES/open-instruct')\n"
        f"__import__('tests.outside.stand_ins').outside.stand_ins.stand_for({ABSENT})\n",
    ),
    ("        snapshot_download(model_path, revision=args.model_revision)\n", "        pass\n"),
    ("dtype=torch.bfloat16,\n                attn", "dtype=torch.float32,\n                attn"),
    ("attn_implementation=model_utils.detect_hf_attn_implementation()", "attn_implementation='sdpa'"),
    ("                low_cpu_mem_usage=args.low_cpu_mem_usage,\n", ""),
    ('from_tf=bool(".ckpt" in args.model_name_or_path),', ""),
    ("torch.cuda.max_memory_reserved(device=torch.cuda.current_device())", "0"),
    ("torch.cuda.max_memory_allocated(device=torch.cuda.current_device())", "0"),
    ("            safe_serialization=False,\n", ""),
)
for packed in ("", ", packing"):
    OTHERS[f"open-instruct finetune{packed}"] = Case(
        "open-instruct/open_instruct/finetune.py",
        "--model_name_or_path ROOT/wide --tokenizer_name_or_path ROOT/wide --dataset_mixer_list ROOT/chats/full.jsonl "
        "1.0 --max_seq_length 33 --per_device_train_batch_size ROWS --gradient_accumulation_steps 2 "
        "--learning_rate 1e-2 --lr_scheduler_type linear --warmup_ratio 0.03 --weight_decay 0.1 --num_train_epochs 2 "
        "--output_dir OUT --clip_grad_norm 0.5 --logging_steps 1 --push_to_hub false "
        "--try_launch_beaker_eval_jobs false --dataset_local_cache_dir OUT/cache --checkpointing_steps 1 "
        "--keep_last_n_checkpoints 1 --fused_optimizer false --with_tracking false --seed 1 --add_bos false "
        "--do_not_randomize_output_dir --chat_template_name tulu" + (" --packing" if packed else ""),
        edits=INSTRUCT,
    )

#: What Transformers 5 has under another name, and deepspeed's names, which no run here uses.
RENAMED = (
    ("from deepspeed import zero\n", ""),
    ("from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus\n", ""),
    ("from transformers import Trainer, GPTQConfig, deepspeed", "from transformers import Trainer, GPTQConfig"),
    (
        "from transformers import Trainer, BitsAndBytesConfig, deepspeed",
        "from transformers import Trainer, BitsAndBytesConfig",
    ),
    ("deepspeed.is_deepspeed_zero3_enabled()", "False"),
    ("args.local_rank == 0", "args.process_index == 0"),  # which is -1 in one process now
    ("model=model, tokenizer=tokenizer,", "model=model, processing_class=tokenizer,"),
)
ADAPTERS = "--lora_dropout 0 --lora_target_modules q_proj v_proj down_proj"
TALKS = (
    "--model_name_or_path ROOT/started --data_path ROOT/talks/train.json --eval_data_path ROOT/talks/validation.json "
    f"--model_max_length 63 {TRAINER} --max_steps 3"
)
QWEN = (
    *RENAMED,
    ("tokenizer.im_start_id", 'tokenizer.convert_tokens_to_ids("<|im_start|>")'),
    ("tokenizer.im_end_id", 'tokenizer.convert_tokens_to_ids("<|im_end|>")'),
    ("tokenizer.pad_token_id = tokenizer.eod_id", "pass"),
    ('["wte", "lm_head"]', "None"),
    ("dtype=torch.int)", "dtype=torch.long)"),
)
DIALOGUES = (
    "--model_name_or_path ROOT/qwen2 --data_path ROOT/dialogues/train.json --model_max_length 65 "
    f"--eval_data_path ROOT/dialogues/validation.json {TRAINER} --max_steps 3"
)
FASTCHAT = (
    ("import pathlib\n", "import pathlib, sys; sys.path.insert(0, 'SOURCES/FastChat')\n"),
    (
        "from fastchat.model.model_adapter import get_conversation_template",
        "from fastchat.conversation import get_conv_template as get_conversation_template",
    ),
    (
        'get_conversation_template("vicuna")',
        'get_conversation_template("vicuna_v1.1"); conv.system_message = "A chat."',
    ),
    ("tokenizer.legacy", "True"),
    ("trainer_save_model_safe(trainer)\n\n", "trainer.save_model()\n\n"),  # by torch's FSDP, which no process has here
    ("tokenizer.unk_token", "tokenizer.pad_token"),
    ("from fastchat.train.train import", "from train_edited import"),
    ("from fastchat.train.llama_flash_attn_monkey_patch import (\n    replace_llama_attn_with_flash_attn,\n)\n", ""),
    *RENAMED,
)
INSTRUCTIONS = {
    "stanford_alpaca train.py": Case(
        "stanford_alpaca/train.py",
        "--model_name_or_path ROOT/llama --data_path ROOT/instructions/train.json --model_max_length 97 "
        f"{TRAINER} --max_steps 3",
        edits=(
            (
                "import utils\n",
                "import json, types\n\nutils = types.SimpleNamespace(jload=lambda path: json.load(open(path)))\n",
            ),
            *RENAMED,
        ),
    ),
    "FastChat train.py": Case("FastChat/fastchat/train/train.py", f"{TALKS} --eval_strategy epoch", edits=FASTCHAT),
    "FastChat train_lora.py": Case("FastChat/fastchat/train/train_lora.py", f"{TALKS} {ADAPTERS}", edits=FASTCHAT),
    "Qwen finetune.py": Case("Qwen/finetune.py", f"{DIALOGUES} --eval_strategy steps --eval_steps 2", edits=QWEN),
    "Qwen finetune.py, LoRA": Case("Qwen/finetune.py", f"{DIALOGUES} --use_lora {ADAPTERS}", edits=QWEN),
}
RETRIEVAL = f"--model_name_or_path ROOT/bert --train_group_size 3 --temperature 0.5 {TRAINER} --max_steps 3 --do_train"
#: Where the script's package lies; the one of FlagEmbedding would import rerankers of Transformers 4.
PACKAGES = {
    "tevatron": ("import logging\n", "import logging, sys\n\nsys.path.insert(0, 'SOURCES/tevatron/src')\n"),
    "FlagEmbedding": (
        "from transformers import HfArgumentParser\n",
        "import sys, types\nfrom transformers import HfArgumentParser, Trainer\n\n"
        "Trainer.tokenizer = property(lambda trainer: trainer.processing_class)\n"
        "package = sys.modules['FlagEmbedding'] = types.ModuleType('FlagEmbedding')\n"
        "package.__path__ = ['SOURCES/FlagEmbedding/FlagEmbedding']\n",
    ),
}
FLAG = (
    "FlagEmbedding/FlagEmbedding/finetune/embedder/encoder_only/base/__main__.py",
    f"{RETRIEVAL} --train_data ROOT/retrieval/train.jsonl --query_max_len 17 --passage_max_len 33",
)
EMBEDDING = {
    "tevatron train.py": Case(
        "tevatron/src/tevatron/retriever/driver/train.py",
        f"{RETRIEVAL} --dataset_path ROOT/retrieval/train.jsonl --attn_implementation sdpa",
        edits=(PACKAGES["tevatron"],),
    ),
    "tevatron train.py, full batches": Case(
        "tevatron/src/tevatron/retriever/driver/train.py",
        f"{RETRIEVAL} --dataset_path ROOT/retrieval/full.jsonl --attn_implementation sdpa",
        edits=(PACKAGES["tevatron"],),
    ),
    "FlagEmbedding encoder_only": Case(*FLAG, edits=(PACKAGES["FlagEmbedding"],)),
    "FlagEmbedding encoder_only, negatives_cross_device": Case(
        FLAG[0],
        FLAG[1].replace("train.jsonl", "full.jsonl"),
        edits=(
            PACKAGES["FlagEmbedding"],
            (  # which one process cannot have, and need not
                "    runner = Enc",
                "    connected = sys.modules['torch'].distributed.is_initialized()\n"
                "    training_args.negatives_cross_device = connected\n    runner = Enc",
            ),
        ),
    ),
}
#: Pictures of 32 pixels and one of timm's models for tests, whose norms over batches are its own.
PETS = (
    ('"batch_size": 64, "image_size": 224', '"batch_size": ROWS, "image_size": 32'),
    ('create_model("resnet50d", pretrained=True', 'create_model("KIND", pretrained=False'),
    ("num_workers=4", "num_workers=0"),
    ("lr=lr / 25)", "lr=lr / 25, eps=1e-3)"),
    (  # whose phases end a step early, of which there are as many more as data ranks
        "OneCycleLR(optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader))",
        "torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)",
    ),
    ("for fname in os.listdir(args.data_dir)", "for fname in sorted(os.listdir(args.data_dir))"),
    ("int(0.8 * len(file_names))", "24"),
    ("accelerator.end_training()", "accelerator.save_model(model, 'OUT/end')"),
)
COMPLETE = {
    f"complete_cv_example{more}": Case(
        "accelerate/examples/complete_cv_example.py",
        "--data_dir ROOT/media/pets --cpu --checkpointing_steps epoch --output_dir OUT",
        edits=tuple((old, new.replace("KIND", kind)) for old, new in (*PETS, *trains)),
        again=again,
    )
    for more, kind, trains, again in (
        ("", "test_resnet", (), ""),
        (", all trains", "test_resnet", (("param.requires_grad = False", "pass"),), ""),
        (", other norms", "test_efficientnet", (("param.requires_grad = False", "pass"),), ""),
        (", resumed", "test_resnet", (), "--resume_from_checkpoint OUT/epoch_0"),
    )
}
ORIGINALS = {
    **COMPLETE,
    **INSTRUCTIONS,
    **EMBEDDING,
    **TRANSFORMERS,
    **ACCELERATE,
    **ALIGNING,
    **SENTENCES,
    **INFERRING,
    **LESS,
    **LMFLOW,
    **EDITING,
    **PRIVATE,
    **LATENT,
    **UNLIKE,
    **ROBOTS,
    **LOOKING,
    **LOOPS,
    **OPEN_R1,
    **PEFT,
    **FACTORY,
    **CHRONOS,
    **COLPALI,
    **GLINER,
    **TRL_EXAMPLES,
    **TUNING,
    **DIFFUSION,
    **AXOLOTL,
    **COURSE,
    **OWN_TRAINERS,
    **BORROWED,
    **PREFERENCES,
    **METHODS,
    **NATIVE,
    **NOTEBOOKS,
    **OTHERS,
}
