"""Steps of a hand-written loop on batches of any kind, alone and over cp ranks, and what they must agree in."""

from typing import Any

import torch

from tests import models
from tests.training import Tolerance, key_differences, number_differences, tensor_differences

#: name -> entries of a batch beside tokens and labels. 33 tokens: nothing divides them.
ROWS, LENGTH = 2, 33
DOCUMENTS = (5, 11, 2, 14, 1)


def batch(kind: str, step: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Rows of one document, padded rows, or packs of five documents beside packs of two."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 515, (ROWS, length), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, :6], mask[1, 20:] = 0, 0
        return {"input_ids": tokens, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
    if kind == "ends":  # as padded, and nothing is read off a token of padding, of which kernels make different things
        mask = torch.ones_like(tokens)
        mask[0, :6], mask[1, 20:] = 0, 0
        labels = labels.masked_fill(mask == 0, -100)
        labels[0, 6] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    if kind == "packed":
        packs = (DOCUMENTS, (20, 13))
        positions = torch.stack([torch.cat([torch.arange(n) for n in pack]) for pack in packs])
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if kind == "classes":
        mask = torch.ones_like(tokens)
        mask[1, 20:] = 0
        return {"input_ids": tokens, "labels": tokens[:, 0] % 3, "attention_mask": mask}
    return {"input_ids": tokens, "labels": labels}


def script_loss(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that reads the logits of all tokens, in their order, and couples neighbours."""
    labels = given.pop("labels")
    logits = model(**given).logits
    kept = labels[:, 1:] != -100
    own = torch.nn.functional.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept])
    return own + 0.1 * (logits[:, 1:] - logits[:, :-1]).pow(2).mean()


def steps(name: str, kind: str, spec: str | None, own: bool = True, **changes: Any) -> dict[str, Any]:
    """Two SGD steps; losses, gradient norms, gradient keys and the weights afterwards."""
    import hf_parallel

    checkpointed = changes.pop("checkpointed", False)
    model = models.build(name, **changes)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.train()
    if spec:
        hf_parallel.parallelize(model, hf_parallel.ParallelConfig.parse(spec))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "norms": [], "keys": []}
    for step in range(2):
        given = batch(kind, step)
        loss = model(**given).loss if own else script_loss(model, given)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(float(hf_parallel.clip_grad_norm(model, 1e9)))
        found["keys"].append(sorted(key for key, p in model.named_parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    whole = hf_parallel.full_state_dict(model) if spec else model.state_dict()
    found["weights"] = {key: value.clone() for key, value in whole.items()}
    return found


def all_steps(cases: list[tuple], specs: bool) -> list[dict[str, Any]]:
    """Of several cases (model, kind, spec, own loss, changes of the config), in one process or one set of ranks."""
    return [steps(name, kind, spec if specs else None, own, **changes) for name, kind, spec, own, changes in cases]


def differences(cases: list[tuple], ranks: list[list[dict]], alone: list[dict]) -> list[str]:
    """What is not as in one process, in words: losses, norms, keys of gradients, weights."""
    found = []
    for number, (case, expected) in enumerate(zip(cases, alone, strict=True)):
        here = [rank[number] for rank in ranks]
        lines = key_differences([ours["keys"] for ours in here], expected["keys"])
        for rank, ours in enumerate(here):
            for key in ("losses", "norms"):
                lines += [f"rank {rank}, {key}: {line}" for line in number_differences(ours[key], expected[key])]
        lines += tensor_differences("weight", here[0]["weights"], expected["weights"], Tolerance.weights)
        found += [f"{case}: {line}" for line in lines]
    return found
