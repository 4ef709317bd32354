"""sentence-transformers scripts: embeddings, cross-encoders and sparse encoders, their losses, samplers and tables.

Compared is what `trainers` compares, the loss of each component, the numbers of an evaluator, and what the model gives
for texts before and after.
"""

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, DatasetDict, disable_progress_bars
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.cross_encoder import losses as cross
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.multi_vector_encoder import losses as multi
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer import losses as dense
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder import losses as sparse
from sentence_transformers.sparse_encoder.evaluation import SparseEmbeddingSimilarityEvaluator
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseAutoEncoder, SpladePooling
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PrinterCallback
from transformers.integrations import peft as integration

from tests import models
from tests.drawn import trainers
from tests.drawn.bench import Choices, Kind
from tests.drawn.trainers import Keeper
from tests.drawn.trl_scripts import Texts
from tests.outside import materials
from tests.training import EVAL_SEED, TRAIN_SEED, activate, weights

#: Losses: the columns that they read, and how a script makes them.
LOSSES: dict[str, tuple[str, Callable[..., Any]]] = {
    "cosine": ("scored", lambda model: dense.CosineSimilarityLoss(model)),
    "cosent": ("scored", lambda model: dense.CoSENTLoss(model)),
    "angle": ("scored", lambda model: dense.AnglELoss(model)),
    "ranking": ("pairs", lambda model: dense.MultipleNegativesRankingLoss(model)),
    "ranking_triples": ("triples", lambda model: dense.MultipleNegativesRankingLoss(model, scale=7.0)),
    "ranking_gathered": ("pairs", lambda model: dense.MultipleNegativesRankingLoss(model, gather_across_devices=True)),
    "symmetric": ("pairs", lambda model: dense.MultipleNegativesSymmetricRankingLoss(model)),
    "cached": ("pairs", lambda model: dense.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)),
    "cached_triples": ("triples", lambda model: dense.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)),
    "cached_symmetric": (
        *("pairs", lambda model: dense.CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=3)),
    ),
    "matryoshka": (
        "pairs",
        lambda model: dense.MatryoshkaLoss(model, dense.MultipleNegativesRankingLoss(model), [64, 24, 7]),
    ),
    "matryoshka_scored": (
        "scored",
        lambda model: dense.MatryoshkaLoss(model, dense.CoSENTLoss(model), [64, 9], [1.0, 0.3]),
    ),
    "matryoshka_cached": (
        "pairs",
        lambda model: dense.MatryoshkaLoss(
            model, dense.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3), [64, 24]
        ),
    ),
    "layers": (
        *("scored", lambda model: dense.AdaptiveLayerLoss(model, dense.CoSENTLoss(model), n_layers_per_step=-1)),
    ),
    "contrastive": ("same", lambda model: dense.ContrastiveLoss(model)),
    "contrastive_sum": ("same", lambda model: dense.ContrastiveLoss(model, size_average=False)),
    "online": ("same", lambda model: dense.OnlineContrastiveLoss(model)),
    "triplet": ("triples", lambda model: dense.TripletLoss(model)),
    "all_triplets": ("classes", lambda model: dense.BatchAllTripletLoss(model)),
    "hard_triplets": ("classes", lambda model: dense.BatchHardTripletLoss(model)),
    "soft_triplets": ("classes", lambda model: dense.BatchHardSoftMarginTripletLoss(model)),
    "semihard_triplets": ("classes", lambda model: dense.BatchSemiHardTripletLoss(model)),
    "margin_mse": ("margins", lambda model: dense.MarginMSELoss(model)),
    "mse": ("vectors", lambda model: dense.MSELoss(model)),
    "distill": ("margins_of_two", lambda model: dense.DistillKLDivLoss(model)),
    "orthogonal": ("pairs", lambda model: dense.GlobalOrthogonalRegularizationLoss(model)),
    "cross_binary": ("same", lambda model: cross.BinaryCrossEntropyLoss(model)),
    "cross_mse": ("scored", lambda model: cross.MSELoss(model)),
    "cross_classes": ("three", lambda model: cross.CrossEntropyLoss(model)),
    "cross_margin": ("margins", lambda model: cross.MarginMSELoss(model)),
    "cross_lambda": ("lists", lambda model: cross.LambdaLoss(model)),
    "cross_lambda_pieces": (
        "lists",
        lambda model: cross.LambdaLoss(model, cross.LambdaRankScheme(), mini_batch_size=3),
    ),
    "cross_list_mle": ("lists", lambda model: cross.ListMLELoss(model)),
    "cross_plist_mle": ("lists", lambda model: cross.PListMLELoss(model)),
    "cross_list_net": ("lists", lambda model: cross.ListNetLoss(model)),
    "cross_rank_net": ("lists", lambda model: cross.RankNetLoss(model)),
    "cross_adr": ("lists", lambda model: cross.ADRMSELoss(model)),
    "splade": (
        "pairs",
        lambda model: sparse.SpladeLoss(
            model,
            sparse.SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=0.03,
            query_regularizer_weight=0.05,
        ),
    ),
    "splade_margins": (
        "margins",
        lambda model: sparse.SpladeLoss(
            model,
            sparse.SparseMarginMSELoss(model),
            document_regularizer_weight=0.03,
            use_document_regularizer_only=True,
        ),
    ),
    "splade_cached": (
        "pairs",
        lambda model: sparse.CachedSpladeLoss(
            *(model, sparse.SparseMultipleNegativesRankingLoss(model)),
            **{"document_regularizer_weight": 0.03, "query_regularizer_weight": 0.05, "mini_batch_size": 3},
        ),
    ),
    "splade_cosent": (
        *("scored", lambda model: sparse.SpladeLoss(model, sparse.SparseCoSENTLoss(model), 0.03, 0.05)),
    ),
    "splade_triplet": (
        *("triples", lambda model: sparse.SpladeLoss(model, sparse.SparseTripletLoss(model), 0.03, 0.05)),
    ),
    "multi_ranking": ("pairs", lambda model: multi.MultiVectorMultipleNegativesRankingLoss(model)),
    "multi_triples": ("triples", lambda model: multi.MultiVectorMultipleNegativesRankingLoss(model)),
    "multi_cached": (
        *("pairs", lambda model: multi.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3)),
    ),
    "multi_margin": ("margins", lambda model: multi.MultiVectorMarginMSELoss(model)),
    "multi_distill": ("margins_of_two", lambda model: multi.MultiVectorDistillKLDivLoss(model)),
    "csr": ("pairs", lambda model: sparse.CSRLoss(model, beta=0.1, gamma=1.0)),
}
ENCODERS, OTHERS = ("bert", "roberta"), ("llama", "qwen3")
WAYS: dict[str, tuple] = {
    "model": ("bert", "bert", "roberta", *OTHERS),
    "loss": ("ranking", *LOSSES),
    "rows": (24, 22, 13, 31),
    "eval_rows": (16, 13, 8, 17),
    "batch": (8, 4),
    "texts": ("plain", "odd"),
    "alike": (False, True),  # are there rows of one text?
    "pooling": ("mean", "cls", "max", "lasttoken"),
    "base": ("transformer", "static", "router", "frozen_router"),
    "layer": ("none", "dense", "normalize"),
    "lora": ((), (("r", 3), ("target_modules", "all-linear"))),
    "tables": (1, 2),
    "stream": (False, True),
    "dispatches": (False,),  # would rank 0 read the stream for all? accelerate joins no batches of unlike lengths
    "evaluator": (False, True),
    "prompts": (None, "say: ", {"first": "ask: "}),
    "batch_sampler": ("batch_sampler", "no_duplicates", "no_duplicates_hashed", "group_by_label"),
    "multi_dataset_batch_sampler": ("proportional", "round_robin"),
    "learning_rate_mapping": (None, {"embed": 0.01}),
    "max_seq_length": (None, 9),
    "callbacks": trainers.WAYS["callbacks"],
    "twice": ("no", "trains_again", "evaluates_first"),
    "optimizers": trainers.WAYS["optimizers"][:3],
    "resumes": (False, True),
    "resumes_on": trainers.WAYS["resumes_on"],
    "eval_sets": (1, 2),
}
OF_TRAINER: dict[str, tuple] = {
    name: trainers.ARGUMENTS[name]
    for name in (
        *(
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_steps",
            "optim",
            "lr_scheduler_type",
            "warmup_steps",
        ),
        *("weight_decay", "max_grad_norm", "average_tokens_across_devices", "gradient_checkpointing", "logging_steps"),
        *("logging_strategy", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
        *("save_strategy", "save_steps", "save_only_model", "save_total_limit", "load_best_model_at_end"),
        *("dataloader_num_workers", "data_seed", "full_determinism", "bf16"),
    )
} | {"dataloader_drop_last": (True, False)}
#: Losses that data ranks compute with equally many examples: a ragged last batch is dropped there.
OF_FULL_BATCHES = (
    "cached",
    "matryoshka_cached",
    "splade_cached",
    "csr",
    "cross_l",
    "cross_p",
    "cross_r",
    "cross_a",
    "multi",
)
CHOICES = {**WAYS, **OF_TRAINER}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    loss, columns = chosen["loss"], LOSSES[chosen["loss"]][0]
    plain: set[str] = set()
    family = family_of(chosen)
    if family != "sentence" or loss in ("layers", "mse") or loss.startswith(("matryoshka", "cached")):
        plain |= {"layer", "base"}
    if family != "sentence":
        plain |= {"pooling"}
    if chosen["base"] != "transformer" and "base" not in plain:
        plain |= {"lora", "gradient_checkpointing", "learning_rate_mapping", "layer", "max_seq_length"}
    if family == "sparse":
        plain |= {"model"}
    if family == "cross" or loss in ("layers", "csr", "mse") or loss.startswith("matryoshka"):
        plain |= {"layer"}
    if loss == "layers":
        plain |= {"gradient_checkpointing"}
    if chosen["lora"] and family != "sentence":
        plain |= {"lora"}
    if family == "cross":
        plain |= {"stream"}
        chosen["stream"] = False
    if chosen["stream"]:
        plain |= {"batch_sampler", "tables"}
        chosen["max_steps"] = max(chosen["max_steps"], 4)
    if chosen["tables"] == 1:
        plain |= {"multi_dataset_batch_sampler"}
    if columns not in ("classes", "three", "same"):
        plain |= {"batch_sampler"} if chosen["batch_sampler"] == "group_by_label" else set()
    if columns == "lists":
        plain |= {"batch_sampler", "prompts"}
    if chosen["tables"] == 2 or chosen["eval_sets"] == 2:
        plain |= {"lr_scheduler_type", "callbacks", "load_best_model_at_end"}
        chosen |= {"load_best_model_at_end": False, "callbacks": "none", "lr_scheduler_type": "constant"}
    if chosen["load_best_model_at_end"] or chosen["callbacks"] == "early_stopping":
        chosen |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        chosen |= {"load_best_model_at_end": True, "eval_delay": 0, "save_only_model": False}
    if chosen["lr_scheduler_type"] == "reduce_lr_on_plateau":
        chosen |= {"eval_strategy": "steps", "eval_delay": 0}
    if chosen["save_strategy"] == "best":
        chosen |= {"save_strategy": "epoch"}
    if chosen["optimizers"] != "of_arguments":
        plain |= {"optim", "learning_rate_mapping"}
    if chosen["resumes"]:
        chosen |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        chosen |= {"save_only_model": False}
        plain |= {"twice", "callbacks", "load_best_model_at_end"}
    if loss.startswith("cross_lambda"):
        plain |= {"bf16"}  # which turns the order of scores
    # Biases of keys have no gradient but rounding, which these make a step as large as any other.
    if chosen["bf16"] or chosen["optim"] in ("adafactor", "adagrad", "rmsprop"):
        plain |= {"optim"}
    chosen = {**chosen, **{name: PLAIN[name] for name in plain}}
    if loss.startswith(OF_FULL_BATCHES) or chosen["batch_sampler"] != "batch_sampler" or chosen["tables"] == 2:
        chosen["dataloader_drop_last"] = True
    return chosen


def family_of(chosen: Choices) -> str:
    """Which of the library's four models a loss is for."""
    first = chosen["loss"].split("_")[0]
    return {"cross": "cross", "multi": "multi", "splade": "sparse", "csr": "sparse"}.get(first, "sentence")


# ---- data ----------------------------------------------------------------------------------------------------------


def build_data(chosen: Choices, rows: int, seed: int) -> Dataset:
    """A table with the columns that the loss reads."""
    texts, columns = Texts(seed, chosen["texts"] == "odd"), LOSSES[chosen["loss"]][0]
    dice = random.Random(seed)

    def draw() -> str:
        return "the same text" if chosen["alike"] and dice.random() < 0.3 else texts.draw(1, 6)

    def row(place: int) -> dict[str, Any]:
        label = {"scored": dice.random(), "same": place % 3 % 2, "three": place % 3, "margins": 2 * dice.random()}
        given: dict[str, Any] = {"first": draw()}
        if columns not in ("classes", "vectors", "lists"):
            given["second"] = draw()
        if columns in ("triples", "margins", "margins_of_two"):
            given["third"] = draw()
        if columns == "classes":
            given["label"] = place % 3
        elif columns == "vectors":
            given["label"] = [dice.gauss(0, 1) for _ in range(64)]
        elif columns == "margins_of_two":
            given["label"] = [dice.random(), dice.random()]
        elif columns == "lists":
            many = 2 + place % 4
            given |= {
                "docs": [f"{number} {draw()}" for number in range(many)],
                "labels": [float(dice.randrange(3)) for _ in range(many)],
            }
        elif columns in label:
            given["label"] = label[columns]
        return given

    return Dataset.from_list([row(place) for place in range(rows)])


def build_tables(chosen: Choices) -> dict[str, Any]:
    """The tables to train and to evaluate on."""
    train, evaluated = (
        build_data(chosen, chosen["rows"], TRAIN_SEED),
        build_data(chosen, chosen["eval_rows"], EVAL_SEED),
    )
    if chosen["stream"]:
        return {"train_dataset": train.to_iterable_dataset(), "eval_dataset": evaluated}
    if chosen["tables"] == 2:
        train = DatasetDict({"one": train, "two": build_data(chosen, 19, 5)})
        evaluated = DatasetDict({"one": evaluated, "two": build_data(chosen, 16, 6)})
    elif chosen["eval_sets"] == 2:
        evaluated = {"one": evaluated, "two": build_data(chosen, 16, 6)}
    return {"train_dataset": train, "eval_dataset": evaluated}


# ---- the script ----------------------------------------------------------------------------------------------------


def write(model: str, folder: str) -> None:
    """An untrained model with its tokenizer; one with a head for words as well, which sparse encoders read."""
    models.build(model).save_pretrained(folder)
    if model == "bert":
        torch.manual_seed(models.SEED)
        changes = {**models.ENCODER, "num_hidden_layers": 3}
        BertForMaskedLM(BertConfig(**changes)).save_pretrained(f"{folder}/words")
        materials.tokenizer("pairs").save_pretrained(f"{folder}/words")
    materials.tokenizer("pairs" if model == "bert" else "ended").save_pretrained(folder)


def load(chosen: Choices, folder: str) -> Any:
    """The script's model."""
    family, length = (
        family_of(chosen),
        {} if chosen["max_seq_length"] is None else {"max_seq_length": chosen["max_seq_length"]},
    )
    torch.manual_seed(3)
    if family == "cross":
        labels = 3 if chosen["loss"] == "cross_classes" else 1
        kwargs = {"ignore_mismatched_sizes": True}  # of a head for three classes
        model = CrossEncoder(folder, num_labels=labels, max_length=chosen["max_seq_length"], model_kwargs=kwargs)
        model.model.config.pad_token_id = 0
        return model
    if family == "multi":
        tokens = {"module_input_name": "token_embeddings"}
        narrow = Dense(64, 11, bias=False, activation_function=torch.nn.Identity(), **tokens)
        return MultiVectorEncoder(
            modules=[Transformer(folder, **length), narrow, MultiVectorMask(), Normalize(**tokens)]
        )
    if chosen["loss"] == "csr":
        modules = [Transformer(folder, **length), Pooling(64), SparseAutoEncoder(64, hidden_dim=96, k=8, k_aux=16)]
        return SparseEncoder(modules=modules)
    if family == "sparse":
        return SparseEncoder(modules=[MLMTransformer(f"{folder}/words", **length), SpladePooling()])
    if chosen["base"] == "static":
        return SentenceTransformer(modules=[StaticEmbedding(AutoTokenizer.from_pretrained(folder), embedding_dim=64)])
    if chosen["base"] in ("router", "frozen_router"):
        sides = [[Transformer(folder), Pooling(64, pooling_mode=chosen["pooling"])] for _ in range(2)]
        if chosen["base"] == "frozen_router":
            sides[1][0].requires_grad_(False)
        return SentenceTransformer(modules=[Router.for_query_document(*sides)])
    layers = {"dense": [Dense(64, 11)], "normalize": [Normalize()]}.get(chosen["layer"], [])
    modules = [Transformer(folder, **length), Pooling(64, pooling_mode=chosen["pooling"]), *layers]
    model = SentenceTransformer(modules=modules)
    if chosen["lora"]:
        from peft import LoraConfig

        integration.MIN_PEFT_VERSION = "0.20.0"  # Transformers 5.24 asks for a PEFT that is not out yet
        model.add_adapter(LoraConfig(**dict(chosen["lora"]), init_lora_weights=False))
    return model


KINDS = {
    "sentence": (SentenceTransformerTrainer, SentenceTransformerTrainingArguments, EmbeddingSimilarityEvaluator),
    "cross": (CrossEncoderTrainer, CrossEncoderTrainingArguments, CrossEncoderCorrelationEvaluator),
    "multi": (MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments, None),
    "sparse": (SparseEncoderTrainer, SparseEncoderTrainingArguments, SparseEmbeddingSimilarityEvaluator),
}


def make(chosen: Choices, model: Any, out: str, data_ranks: int, keeper: Keeper, stop: int | None) -> Any:
    """The script's trainer."""
    family = family_of(chosen)
    kind, arguments_kind, evaluator = KINDS[family]
    given = {name: chosen[name] for name in OF_TRAINER if chosen[name] != trainers.PLAIN[name]}
    given |= {name: chosen[name] for name in ("eval_steps", "save_steps", "dataloader_drop_last")}
    names = ("prompts", "batch_sampler", "multi_dataset_batch_sampler", "learning_rate_mapping")
    given |= {name: chosen[name] for name in names if chosen[name] != PLAIN[name]}
    if "router" in chosen["base"]:
        given["router_mapping"] = {"first": "query", "second": "document", "third": "document"}
    size = chosen["batch"] // data_ranks
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    lr = {
        "learning_rate": 0.005 if chosen["bf16"] else 0.05 if given.get("optim", "sgd") == "sgd" else 1e-3,
        "adam_epsilon": 1e-3,
    }
    arguments = trainers.arguments_of(out, data_ranks, arguments_kind, **{**sizes, **lr, **given})
    if chosen["stream"]:
        arguments.accelerator_config.dispatch_batches = chosen["dispatches"]
    options: dict[str, Any] = build_tables(chosen)
    loss = LOSSES[chosen["loss"]][1](model)
    options["loss"] = {"one": loss, "two": LOSSES[chosen["loss"]][1](model)} if chosen["tables"] == 2 else loss
    if chosen["optimizers"] != "of_arguments":
        options["optimizers"] = trainers.own_optimizer({**chosen, "optim": "adamw_torch"}, model)
    if chosen["evaluator"] and chosen["loss"] != "cross_classes" and evaluator is not None:
        pairs = build_data({**chosen, "loss": "cosine"}, 7, 9)
        texts = [list(pairs["first"]), list(pairs["second"])]
        scores = list(pairs["label"])
        options["evaluator"] = (
            evaluator(list(zip(*texts, strict=True)), scores) if family == "cross" else evaluator(*texts, scores)
        )
    trainer = kind(model=model, args=arguments, callbacks=trainers.callbacks_of(chosen, keeper, stop), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def read_texts(chosen: Choices, model: Any) -> dict[str, float]:
    """Numbers that change with what the model gives for any of some texts."""
    texts = ["an odd number of texts", "of other lengths", "three"]
    if family_of(chosen) == "cross":
        found = model.predict([(text, texts[0]) for text in texts], convert_to_tensor=True)
    elif family_of(chosen) == "multi":  # a vector for each token
        found = torch.cat(list(model.encode_query(texts)))
    else:
        found = model.encode(
            texts, convert_to_tensor=True, **({"task": "query"} if "router" in chosen["base"] else {})
        )
    found = found.to_dense() if found.is_sparse else found
    return {str(place): float(value) for place, value in enumerate(found.double().flatten()[::3])}


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    warnings.simplefilter("ignore")
    disable_progress_bars()
    keeper = Keeper()
    model = load(chosen, folder)
    before = read_texts(chosen, model)
    trainer = make(chosen, model, out, data_ranks, keeper, 3 if part == "before" else None)
    found = trainers.train_as_chosen(trainer, chosen, part)
    found |= {"texts before": before, "evaluate": trainer.evaluate(), **trainers.read_state(trainer)}
    found["texts after"] = read_texts(chosen, trainer.model)
    trainer.save_model(f"{out}/saved")
    for name in ("1_Dense", "2_Dense", "2_SparseAutoEncoder"):
        saved = weights(f"{out}/saved/{name}")
        found |= {f"{name} {key}": {"sum": float(value.double().abs().sum())} for key, value in saved.items()}
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


#: What does not depend on a stop, before which more is logged.
OF_RESUMED = ("evaluate", "texts", "1_", "2_")


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    low = chosen["bf16"] and (key.endswith(("pearson", "spearman")) or "best" in key)
    return chosen["resumes"] and not name.startswith(OF_RESUMED) or low or key in trainers.COUNTS


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    if chosen["bf16"]:
        return 1e-1, 5e-2
    return 1e-4, 5e-5


KIND = Kind(
    *(CHOICES, fit, script, tolerances, leaves_out, lambda key: 1.0 if key.isdigit() else 0.1, write),
    left_out=("pp", "tiled_mlp", "padding_free", "lean_loss", "attention", "batch_shares"),
)
