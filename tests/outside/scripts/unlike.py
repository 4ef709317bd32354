"""Train one small model by methods that change weights, gradients, layers or optimizers in ways of their own.

The classes and functions of each project are read from its checkout; tokens are drawn, and Trainer runs them.
"""

import sys
import types
from functools import partial
from pathlib import Path

import torch
from borrowed_trainers import read_module
from latent import causal, main
from torch.nn.functional import cross_entropy
from transformers import AutoModel, Trainer, TrainerCallback

ROWS = 33


def even(features):
    """Rows of one length, all of whose tokens are targets: a mean over rows is one over tokens."""
    ids = torch.tensor([(row["input_ids"] * 2)[:ROWS] for row in features])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def projected_gradients(given, args):
    """PCGrad takes the gradients of two losses of one graph, one after another, and projects each on the other."""
    surgery = read_module("pcgrad", Path(given.sources, "Pytorch-PCGrad/pcgrad.py"))

    class Surgery(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            outputs, ids = model(**inputs), inputs["input_ids"]
            again = cross_entropy(outputs.logits.flatten(0, 1), (7 * ids.flatten() + 3) % 500)
            surgery.PCGrad(self.optimizer).pc_backward([outputs.loss, again])
            return (outputs.loss + again).detach()

    return Surgery, causal(given), {"data_collator": even}


def sharpness(given, args, adaptive=False):
    """SAM climbs by the gradient of a step, and takes a second one there."""
    sam = read_module("sam", Path(given.sources, "sam/sam.py"))
    model = causal(given)

    class ByClosure(sam.SAM):
        def step(self, closure=None):  # Trainer's own call has none
            return super().step(closure) if closure else None

    optimizer = ByClosure(model.parameters(), torch.optim.SGD, rho=0.5, adaptive=adaptive, lr=0.3, momentum=0.9)

    class Sharp(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)

            def closure():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                self.accelerator.backward(loss)
                return loss.detach()

            loss = closure()
            self.optimizer.optimizer.step(closure)
            return loss

    return Sharp, model, {"optimizers": (optimizer, None), "data_collator": even}


def pruned(given, args, kind="prune_wanda"):
    """Wanda catches the inputs of layers, calls each layer by itself, and writes zeros; then the model is tuned."""
    sys.modules["lib"] = types.ModuleType("lib")
    folder = Path(given.sources, "wanda/lib")
    for name in ("layerwrapper", "sparsegpt", "ablate"):
        read_module(f"lib.{name}", folder / f"{name}.py", WANDA)
    data = types.ModuleType("lib.data")
    batches = [(ids, ids) for ids in torch.randint(5, 500, (5, 1, ROWS), generator=torch.Generator().manual_seed(3))]
    data.get_loaders = lambda *args, **kwargs: (batches, None)
    sys.modules["lib.data"] = data
    prune = read_module("lib.prune", folder / "prune.py", WANDA)
    model = causal(given)
    model.seqlen, model.hf_device_map = ROWS, {}
    asked = types.SimpleNamespace(nsamples=5, seed=0, sparsity_ratio=0.5, use_variant=False)
    getattr(prune, kind)(asked, model, None, torch.device("cpu"))
    share = prune.check_sparsity(model)
    assert 0.4 < share < 0.6, share

    class Told(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            Path(given.output_dir, "share.txt").write_text(f"{share:.5f}")

    return Trainer, model, {"callbacks": [Told()]}


WANDA = (
    ("torch.zeros((128,", "torch.zeros((5,"),
    (".cuda()", ""),
    ("cache['position_ids'] = kwargs['position_ids']", "cache.update(kwargs)"),
    ("position_ids = cache['position_ids']", "cache.pop('i'); position_ids = cache"),
    ("attention_mask=attention_mask, position_ids=position_ids", "**position_ids"),
    ("torch.cuda.synchronize()", ""),
    ("from .", "from lib."),
)


def soft_prompt(given, args, drawn=False):
    """A prompt of vectors in the place of the embedding, which it holds; nothing else is trained."""
    module = read_module("soft_embedding", Path(given.sources, "soft-prompt-tuning/soft_embedding.py"))
    model = causal(given)
    prompt = module.SoftEmbedding(model.get_input_embeddings(), n_tokens=5, initialize_from_vocab=not drawn)
    model.set_input_embeddings(prompt)
    for name, param in model.named_parameters():
        param.requires_grad = "learned_embedding" in name

    def prompted(features):
        batch = even(features)
        before = torch.full((len(features), 5), 3)
        return {
            "input_ids": torch.cat([before, batch["input_ids"]], 1),
            "attention_mask": torch.ones(len(features), ROWS + 5, dtype=torch.long),
            "labels": torch.cat([torch.full_like(before, -100), batch["labels"]], 1),
        }

    return Trainer, model, {"data_collator": prompted}


def eigenbases(given, args, **settings):
    """SOAP runs Adam in the eigenbases of Shampoo's matrices, which it keeps in lists of states."""
    soap = read_module("soap", Path(given.sources, "SOAP/soap.py"))
    model = causal(given)
    optimizer = soap.SOAP(model.parameters(), lr=1e-2, eps=1e-3, precondition_frequency=2, **settings)
    return Trainer, model, {"optimizers": (optimizer, None)}


def curvature(given, args):
    """Sophia estimates curvature every two steps by a second backward pass, on labels of its own."""
    sophia = read_module("sophia", Path(given.sources, "Sophia/sophia.py"))
    model = causal(given)
    optimizer = sophia.SophiaG(model.parameters(), lr=1e-2, rho=0.04)

    class Curved(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step % 2:
                return
            model.zero_grad()
            ids = torch.randint(5, 500, (4, ROWS), generator=torch.Generator().manual_seed(state.global_step))
            logits = model(input_ids=ids).logits
            cross_entropy(logits.flatten(0, 1), ids.roll(5, dims=1).flatten()).backward()
            getattr(optimizer, "optimizer", optimizer).update_hessian()
            model.zero_grad()

    return Trainer, model, {"optimizers": (optimizer, None), "callbacks": [Curved()]}


def cached_gradients(given, args):
    """GradCache runs its encoder without a graph, and again by chunks towards the gradients of what that gave."""
    folder = Path(given.sources, "GradCache/src/grad_cache")
    sys.modules["grad_cache"] = types.ModuleType("grad_cache")
    read_module("grad_cache.context_managers", folder / "context_managers.py")
    cache = read_module("grad_cache.grad_cache", folder / "grad_cache.py")
    losses = read_module("grad_cache.loss", folder / "loss.py")
    model = AutoModel.from_pretrained(given.model)

    class Cached(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            inputs.pop("labels")
            other = {**inputs, "input_ids": inputs["input_ids"].roll(1, dims=1)}
            distributed = torch.distributed.is_initialized()
            loss = losses.DistributedContrastiveLoss() if distributed else losses.SimpleContrastiveLoss()
            step = cache.GradCache(
                models=[model, model],
                chunk_sizes=3,
                loss_fn=lambda x, y: loss(x / 5, y / 5),
                get_rep_fn=lambda outputs: outputs.last_hidden_state.mean(dim=1),
            )
            return step(inputs, other)

    return Cached, model, {"data_collator": even, "eval_dataset": None}


def mixed_out(given, args, p=0.0):
    """Mixout replaces linears by its own, which mix their weights with those they had."""
    sys.path.insert(0, f"{given.sources}/mixout")
    from mixout import MixLinear

    model = causal(given)
    for layer in model.model.layers:
        linear = layer.mlp.down_proj
        state = linear.state_dict()
        layer.mlp.down_proj = MixLinear(linear.in_features, linear.out_features, False, state["weight"], p)
        layer.mlp.down_proj.load_state_dict(state)
    return Trainer, model, {}


def shortened(given, args, chosen=None):
    """ShortGPT removes the layer that changes hidden states least, or one that is known, and the rest is tuned."""
    folder = Path(given.sources, "ShortGPT/short_gpt")
    metrics = read_module("metrics", folder / "metrics.py")
    removal = read_module("layer_removal", folder / "layer_removal.py", SHORT)
    model = causal(given)
    ids = torch.randint(5, 500, (4, ROWS), generator=torch.Generator().manual_seed(3))
    if chosen is None:
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        scores = [metrics.block_influence(a, b).sum().item() for a, b in zip(states, states[1:], strict=False)]
        chosen = min(range(len(scores)), key=scores.__getitem__)
    removal.layer_removal(model, {"model.layers": chosen})
    model.config.num_hidden_layers -= 1
    return Trainer, model, {}


SHORT = (("del getattr(mod, modules[-1])\n", "delattr(mod, modules[-1])\n"),)


def expanded(given, args):
    """LLaMA-Pro puts copies of layers between them, whose last factors are zero, and trains these alone."""
    import copy

    model = causal(given)
    layers = torch.nn.ModuleList()
    for index, layer in enumerate(model.model.layers):
        layer.requires_grad_(False)
        layers.append(layer)
        if index % 2:
            new = copy.deepcopy(layer).requires_grad_(True)
            new.self_attn.o_proj.weight.data.zero_()
            new.mlp.down_proj.weight.data.zero_()
            layers.append(new)
    model.model.layers = layers
    model.config.num_hidden_layers = len(layers)
    return Trainer, model, {}


def quantized_in_training(given, args):
    """torchao rounds activations of each token and groups of weights in the forward pass."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = causal(given)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=16)
    config = QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    quantize_(model.model.layers, config)
    return Trainer, model, {}


def ternary(given, args):
    """BitNet's linears of Transformers round their weights to three values by the mean of all of them."""
    from transformers.integrations import bitnet

    for kind in (bitnet.WeightQuant, bitnet.ActQuant):  # without a compiler
        kind.forward = staticmethod(getattr(kind.forward, "__wrapped__", kind.forward))
    model = causal(given)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    own = bitnet.AutoBitLinear(linear.in_features, linear.out_features, bias=False, online_quant=True)
                    own.load_state_dict(linear.state_dict())
                    setattr(part, name, own)
    return Trainer, model, {}


def momentum(given, args):
    """Contriever's MoCo moves a second encoder after the first in the forward pass, and keeps a queue in a buffer."""
    sources = Path(given.sources, "contriever/src")
    sys.modules["src"] = types.ModuleType("src")
    sys.modules["src.utils"] = utils = types.ModuleType("src.utils")
    sys.modules["src"].utils = utils
    utils.load_hf = lambda kind, name: kind.from_pretrained(name)
    for name in ("dist_utils", "contriever", "moco"):
        module = read_module(f"src.{name}", sources / f"{name}.py", MOMENTUM)
        setattr(sys.modules["src"], name, module)
    asked = types.SimpleNamespace(
        queue_size=48, momentum=0.9, temperature=0.5, label_smoothing=0.1, norm_doc=True, norm_query=True,
        moco_train_mode_encoder_k=True, retriever_model_id=given.model, pooling="average", random_init=False,
        projection_size=32,
    )  # fmt: skip
    torch.manual_seed(7)
    args.remove_unused_columns = False
    model = sys.modules["src.moco"].MoCo(asked)

    def pairs(features):
        ids = even(features)["input_ids"]
        mask = torch.ones_like(ids)
        return {"q_tokens": ids, "q_mask": mask, "k_tokens": ids.roll(3, dims=1), "k_mask": mask}

    return Trainer, model, {"data_collator": pairs, "eval_dataset": None}


MOMENTUM = (
    ("            head_mask=head_mask,\n", ""),
    ("            output_attentions=output_attentions,\n            output_hidden_states=output_hidden_states,\n", ""),
    (".cuda()", ""),
)

METHODS = {
    "momentum": momentum,
    "projected gradients": projected_gradients,
    "sharpness": sharpness,
    "sharpness adaptive": partial(sharpness, adaptive=True),
    "wanda": pruned,
    "magnitude": partial(pruned, kind="prune_magnitude"),
    "sparsegpt": partial(pruned, kind="prune_sparsegpt"),
    "soft prompt": soft_prompt,
    "soft prompt drawn": partial(soft_prompt, drawn=True),
    "eigenbases": eigenbases,
    "eigenbases merged": partial(eigenbases, merge_dims=True, max_precond_dim=70, normalize_grads=True),
    "curvature": curvature,
    "cached gradients": cached_gradients,
    "mixout": mixed_out,
    "mixout drawn": partial(mixed_out, p=0.5),
    "shortened": shortened,
    "shortened by one": partial(shortened, chosen=2),
    "expanded": expanded,
    "quantized": quantized_in_training,
    "ternary": ternary,
}

if __name__ == "__main__":
    main(METHODS)
