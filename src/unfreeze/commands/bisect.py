"""unfreeze dev bisect MODEL --against hf: find the first module that differs from transformers'.

Both models hold the same weights in float32. transformers runs once over a few tokens while hooks record
every module's input and output. Then each of our modules gets the recorded input, so an error in one does
not spread to the next. Needs transformers, a development dependency.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Frozen, ModelName, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder

WHOLE = "logits of the whole model"


class Config(Frozen):
    """Options of bisect."""

    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, or Hugging Face id org/name"
    )
    against: Literal["hf"] = Field(
        default="hf", description="the reference: hf is transformers in float32 with eager attention"
    )
    tokens: int = Field(
        default=32,
        ge=2,
        description=(
            "length of the one document that both models read; 32 activates every module and takes a second"
        ),
    )
    tolerance: float = Field(
        default=2e-5,
        gt=0,
        description=(
            "largest |ours - reference| / largest |reference| allowed in a module; random models of"
            " every family stay under 1e-6"
        ),
    )
    seed: int = Field(default=0, ge=0, description="seed of the random token ids")


@dataclass(frozen=True)
class Difference:
    """Difference in one module's output, or in the whole model's logits.

    max_abs   largest absolute difference
    relative  max_abs divided by the oracle's largest absolute value
    """

    module: str
    kind: str
    max_abs: float
    relative: float


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> first (module or None), modules (module, kind, max_abs, relative), exit_code 1 if one differs."""
    config = parse(Config, arguments, command="bisect", description=__doc__ or "", positional=True)
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.source import refuse_unread_model
    from unfreeze.job.opening.device import say

    manifest = open_checkpoint(config.model, progress=say(common))
    refuse_unread_model(manifest)
    load_oracle_library()

    import torch

    from unfreeze.generate.open import open_model

    refuse_too_large(manifest)
    ours = open_model(manifest, torch.float32)
    theirs = oracle(manifest, ours)
    ids = torch.randint(
        0, ours.shape.vocab_size, (config.tokens,), generator=torch.Generator().manual_seed(config.seed)
    )
    differences = compare_modules(ours, theirs, ids)
    worst = first(differences, config.tolerance)
    if not common.quiet:
        show_differences(differences, worst, config.tolerance, to_stderr=common.json)
    return {
        "first": worst and worst.module,
        "modules": [asdict(difference) for difference in differences],
        "exit_code": 1 if worst else 0,
    }


def load_oracle_library() -> Any:
    """Import transformers. Raises ConfigError with the command that installs it."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "bisect compares with transformers, which is not installed", next="pip install transformers"
        ) from None
    return transformers


def refuse_too_large(manifest: Manifest) -> None:
    """Raise DoesNotFit if two models in float32 need more than the free memory."""
    from unfreeze import models
    from unfreeze.checkpoint.manifest import count_weights
    from unfreeze.parallel.machine import hardware

    models.shape(manifest.config)  # refuses an unknown family before counting
    if (kind := manifest.config.get("model_type")) in models.ONLY_HERE:
        raise ConfigError(
            f"transformers has no models of type {kind}, so there is nothing to compare with",
            next="bisect a model of the family itself, without parts of its own",
        )
    weights = count_weights(manifest.by_model_name(), manifest.scheme())
    needed, free = 2 * 4 * weights, hardware("cpu").available
    if needed > free:
        raise DoesNotFit(
            f"two models of {weights:,} weights in float32 need {format_bytes(needed)}; {format_bytes(free)}"
            " are free",
            next="bisect a smaller model of the same family: its modules are the same",
        )


def oracle(manifest: Manifest, ours: Decoder) -> nn.Module:
    """Load the checkpoint in transformers: float32, eager attention, no code from the checkpoint.

    If the checkpoint is packed, the model gets our dequantized weights.
    Kimi's config.json says kimi_k2, which transformers calls deepseek_v3.
    """
    import torch

    transformers = load_oracle_library()
    fields = dict(manifest.config.get("text_config") or manifest.config)
    packed = fields.pop("quantization_config", None) is not None
    kind = "deepseek_v3" if fields.get("model_type") == "kimi_k2" else str(fields["model_type"])
    fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    if packed or manifest.prefix:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        model.load_state_dict(expanded(ours), strict=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            manifest.path, config=config, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        )
    return model.eval()


def expanded(model: Decoder) -> dict[str, Tensor]:
    """Return our weights under transformers' names, dequantized.

    Both stack the experts in memory, so only a suffix differs.
    """
    from unfreeze.models.blocks.linear import PackedHolder

    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, PackedHolder) and getattr(module, "codec", None) is not None:
            for suffix in module.packed.parts:
                del state[f"{name}.{suffix}"]
            state[f"{name}.weight"] = module.packed.dequantize().float()
    ends = (".experts.gate_up_proj.weight", ".experts.down_proj.weight")
    return {
        name.removesuffix(".weight") if name.endswith(ends) else name: tensor
        for name, tensor in state.items()
    }


def compare_modules(ours: Decoder, theirs: nn.Module, ids: Tensor) -> list[Difference]:
    """Compare every module that has the same name in both models, then the whole model.

    Modules come in the order in which the oracle finished them, so a part precedes the module around it.
    Our modules get the oracle's inputs. For the last entry, each model runs on its own and logits are
    compared. ids [T], one document.
    """
    import torch

    from unfreeze.core.batch import Batch
    from unfreeze.kernels.attention import DocumentLayout
    from unfreeze.models.blocks.passes import PackedPass

    positions_T, starts_S = torch.arange(len(ids)), torch.zeros(1, dtype=torch.int64)
    batch = Batch(ids, ids, torch.ones(len(ids)), positions_T, starts_S)
    differences = []
    with torch.no_grad():
        calls, logits_TV = record(theirs, ids, {name for name, _ in ours.named_modules()})
        for name, inputs, output in calls:
            module = ours.get_submodule(name)
            tables, named = ours.shape.tables(positions_T)
            layout = DocumentLayout.build(starts_S, len(ids), ours.device)
            run = PackedPass(*tables, layout=layout, named=named)
            pair = answer(module, inputs, output, run)
            if pair is not None:
                differences.append(difference(name, type(module).__name__, *pair))
        differences.append(difference(WHOLE, "Decoder", ours.logits(ours.hidden(batch)), logits_TV))
    return differences


def record(
    model: nn.Module, ids: Tensor, names: set[str]
) -> tuple[list[tuple[str, list[Tensor], Any]], Tensor]:
    """Return ([(module, its tensor inputs, its output)] in the order the modules finished, logits [T, V])."""
    import torch

    calls: list[tuple[str, list[Tensor], Any]] = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tensors = [
                value for value in (*args, kwargs.get("hidden_states")) if isinstance(value, torch.Tensor)
            ]
            calls.append((name, [unbatched(value) for value in tensors], output))

        return note

    handles = [
        m.register_forward_hook(hook(name), with_kwargs=True)
        for name, m in model.named_modules()
        if name and name in names
    ]
    try:
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return calls, logits_TV.float()


def unbatched(value: Tensor) -> Tensor:
    """Drop a batch dimension of 1: [1, T, ...] -> [T, ...]. Anything else is returned unchanged."""
    return value[0] if value.dim() > 1 and value.shape[0] == 1 else value


def answer(module: nn.Module, inputs: list[Tensor], output: Any, run: Any) -> tuple[Tensor, Tensor] | None:
    """Return (our output, the oracle's) of one module for the oracle's input.

    None if the module only contains others (`model`, `layers`).
    """
    from unfreeze.models.blocks.attention import Attending
    from unfreeze.models.blocks.experts import Experts
    from unfreeze.models.blocks.head import Head
    from unfreeze.models.blocks.mla import MLA
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.decoder import Body
    from unfreeze.models.layer import Layer

    if not inputs or isinstance(module, Body):
        return None
    if isinstance(module, Router):
        x_TD = inputs[0]
        scores_TE = module(x_TD)
        ids_TK = module.choose(scores_TE)
        return by_expert(scores_TE, module.weigh(scores_TE, ids_TK), ids_TK), by_expert(
            scores_TE, output[1], output[2]
        )
    theirs = unbatched(output[0] if isinstance(output, tuple) else output)
    if isinstance(module, (Attending, MLA, MoE, Layer)):
        return module(inputs[0], run), theirs
    if isinstance(module, Experts):
        return module(*inputs[:3]), theirs
    # the oracle's head has no softcap or factor on the logits
    return (module.product if isinstance(module, Head) else module)(inputs[0]), theirs


def by_expert(like_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Routing weights [T, E], 0 for experts not chosen. They do not depend on the order of the K."""
    return like_TE.new_zeros(like_TE.shape).scatter_(1, ids_TK, weights_TK.to(like_TE.dtype))


def difference(name: str, kind: str, ours: Tensor, theirs: Tensor) -> Difference:
    """Return max |ours - theirs|, also relative to max |theirs|. A NaN on either side counts as infinite."""
    import torch

    far = float(torch.nan_to_num((ours.float() - theirs.float()).abs(), nan=float("inf")).max())
    size = float(theirs.float().abs().max())
    return Difference(name, kind, far, far / size if size else far)


def first(differences: list[Difference], tolerance: float) -> Difference | None:
    """Return the first module beyond the tolerance.

    The whole model comes last, so it is named only if every module agrees on its own.
    """
    return next((entry for entry in differences if not entry.relative <= tolerance), None)


def show_differences(
    differences: list[Difference], worst: Difference | None, tolerance: float, *, to_stderr: bool
) -> None:
    """Print everything up to the first module that differs, or the five largest differences."""
    from rich.console import Console
    from rich.table import Table

    rows = (
        sorted(differences, key=lambda entry: -entry.relative)[:5]
        if worst is None
        else differences[: differences.index(worst) + 1]
    )
    table = Table(box=None, pad_edge=False)
    for column in ("module", "kind", "max abs", "relative"):
        table.add_column(column, justify="left" if column in ("module", "kind") else "right")
    for entry in rows:
        table.add_row(
            entry.module,
            entry.kind,
            f"{entry.max_abs:.2g}",
            f"{entry.relative:.2g}",
            style="bold red" if entry is worst else "",
        )
    Console(stderr=to_stderr).print(table)
    verdict = f"all {len(differences) - 1} modules and the logits agree within {tolerance:g}"
    if worst is not None:
        verdict = (
            f"first difference: {worst.module} ({worst.kind}), {worst.relative:.2g} of the reference's"
            f" largest value, tolerance {tolerance:g}"
        )
    print(verdict, file=sys.stderr if to_stderr else sys.stdout)
