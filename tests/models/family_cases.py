"""All cases of tests/models/test_families.py: a model of transformers, ours with its weights, and how far apart they are."""

import re

import cases_dense
import cases_hybrid
import cases_kimi_lfm2
import cases_mamba
import cases_moe
import cases_sparse
import torch
import transformers
from family_case import SMALL, Case

from unfreeze import models
from unfreeze.core.batch import Batch

_FILES = (cases_dense, cases_moe, cases_sparse, cases_hybrid, cases_kimi_lfm2, cases_mamba)
CASES = {name: case for file in _FILES for name, case in file.CASES.items()}
CONFIGS = {name: config for file in _FILES for name, config in file.CONFIGS.items()}

DOCUMENTS = [[5, 17, 3, 88, 41, 2, 9], [11, 7], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71]]


# a padding row would have no gradient, and most classes' ids lie beyond a small vocabulary
NO_IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def oracle(name: str):
    """A random transformers model."""
    case = CASES[name]
    torch.manual_seed(0)
    config = case.made({**SMALL, **NO_IDS, "rms_norm_eps": 1e-5, "initializer_range": 0.2})
    return randomized(getattr(transformers, case.model_class), config)


def randomized(model_class, config):
    """A model of that class; norms, biases and the selection bias are random too, so that each of them matters."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config).float().eval()
    for mixer in model.modules():  # huggingface/transformers#48989: it clamps dt at time_step_min instead
        if type(mixer).__name__ == "NemotronHMamba2Mixer":
            mixer.time_step_limit = tuple(min(limit, 3e38) for limit in config.time_step_limit)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            elif key.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif key.endswith((".A_log", ".dt_bias", ".D")):  # of Mamba-2: log(1 to heads), ones, ones
                tensor.mul_(0.3).add_(0.5 * torch.randn_like(tensor))
            elif key.endswith(("position_bias", "sinks", "_base", "hc.base", "hc.scale", "hc_scale")):
                tensor.add_(0.5 * torch.randn_like(tensor))
            elif key.endswith("tid2eid"):  # no token names an expert twice
                tensor.copy_(
                    torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]]
                )
            elif key.endswith(".bias"):
                tensor.copy_(0.1 * torch.randn_like(tensor))
    return model


def ours(reference, case: Case) -> models.Decoder:
    """Our model with the oracle's weights, tensor by tensor."""
    shape = models.shape(reference.config.to_dict())
    model = models.build(shape, dtype=torch.float32, device="cpu")
    beside = re.compile("|".join(models.WRAPPERS[shape.wrapper].beside) if shape.wrapper else "$^")
    theirs = {
        name: tensor
        for name, tensor in reference.state_dict().items()
        if not beside.match(name) and not beside.match(name.removeprefix("model."))
    }
    state = {name: case.turned(name, theirs[case.theirs(name)]) for name in model.state_dict()}
    left = theirs.keys() - {case.theirs(name) for name in state}
    assert not left, f"tensors of transformers that we lack: {sorted(left)}"
    model.load_state_dict(state, strict=True)
    return model


def batch_of(documents: list[list[int]]) -> Batch:
    starts, position = [], 0
    for document in documents:
        starts.append(position)
        position += len(document)
    tokens = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return Batch(tokens, tokens.clone(), torch.ones(len(tokens)), positions, torch.tensor(starts))


def difference(name: str, recompute=models.plain, documents=DOCUMENTS, change=None) -> tuple[float, float]:
    """Largest absolute difference of logits and of every parameter's gradient (experts included), relative to
    the largest gradient."""
    return apart(oracle(name), CASES[name], recompute, documents, change)


def apart(
    reference, case: Case, recompute=models.plain, documents=DOCUMENTS, change=None
) -> tuple[float, float]:
    """`difference` of a model of transformers and ours with its weights."""
    model = ours(reference, case)
    if change is not None:
        change(model)
    probe = torch.randn(model.shape.vocab_size, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([reference(torch.tensor([document])).logits[0] for document in documents])
    actual = model.logits(model.hidden(batch_of(documents), recompute))
    ((expected.log_softmax(-1) * probe).sum() / len(expected)).backward()
    ((actual.log_softmax(-1) * probe).sum() / len(actual)).backward()
    theirs = {key: p.grad for key, p in reference.named_parameters()}
    worst = 0.0
    for key, parameter in model.named_parameters():
        expected_grad = case.turned(key, theirs[case.theirs(key)])
        if expected_grad is None:  # an expert stack no token was sent to
            assert parameter.grad is None or not parameter.grad.any()
            continue
        worst = max(
            worst,
            float((parameter.grad - expected_grad).abs().max() / max(1.0, float(expected_grad.abs().max()))),
        )
    return float((actual - expected).detach().abs().max()), worst
