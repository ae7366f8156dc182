"""Shared by the scripts of this folder: texts, a small model, packed batches, a step, and result.json.

A script is called as python NAME.py --arm ARM --seed S --out FOLDER, by `unfreeze lab NAME.toml` or by hand,
and writes FOLDER/result.json. It computes on one thread, so that the same seed gives the same numbers.
    python examples/lab/studying.py build/lab/kept_logits     # intervals of all numbers of a study's runs

T tokens of a batch, D model width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.files import write_file
from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of, count_parameters
from unfreeze.models.init import initialize
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule

BYTES = 256


def arguments(about: str | None, arms: Sequence[str]) -> argparse.Namespace:
    """--arm, --seed, --out and --steps of a script; the folder is made."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--arm", choices=arms, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json")
    parser.add_argument("--steps", type=int, help="fewer steps, to try the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return options


def texts() -> tuple[Tensor, Tensor]:
    """Bytes of Python's documentation of the language: those to train on, and every fifth topic, held out."""
    whole = [topics[name].encode() for name in sorted(topics)]
    parts = [text for i, text in enumerate(whole) if i % 5], whole[::5]
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train.long(), held_out.long()


def fresh(
    seed: int, vocabulary: int = BYTES, positions: int = 512, width: int = 64, layers: int = 2, **more: object
) -> Decoder:
    """A llama of random weights in float32. more: further fields of config.json."""
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "intermediate_size": 4 * width,
    }
    model = from_config(
        config_of("llama", sizes, more, vocabulary=vocabulary, positions=positions), torch.float32, "cpu"
    )
    initialize(model, seed)
    return model


def packed(documents: Sequence[Tensor], taught: Sequence[Tensor] | None = None) -> Batch:
    """Documents end to end. taught: for each, whether its position t learns token t + 1; None: all do.

    The last position of a document has no next token, and is never taught.
    """
    lengths = torch.tensor([len(document) for document in documents])
    starts_S = lengths.cumsum(0) - lengths
    tokens_T = torch.cat(list(documents))
    weights_T = torch.ones(len(tokens_T)) if taught is None else torch.cat(list(taught)).float()
    weights_T[starts_S + lengths - 1] = 0
    positions_T = torch.cat([torch.arange(n) for n in lengths.tolist()])
    return Batch(tokens_T, tokens_T.roll(-1), weights_T, positions_T, starts_S)


def mean_loss(model: Decoder, batch: Batch) -> Tensor:
    """Nats per taught token."""
    loss = cross_entropy(model.hidden(batch), model.lm_head, batch)
    return loss.sum / batch.weights_T.sum()


@torch.no_grad()
def each_loss(model: Decoder, batch: Batch) -> Tensor:
    """Nats of every position's next token, taught or not, [T]."""
    log_p_TV = model.logits(model.hidden(batch)).log_softmax(-1)
    return -log_p_TV.gather(1, batch.targets_T[:, None]).squeeze(1)


def attend_eagerly(model: Decoder, rows: int, seen_SL: Tensor | None = None) -> None:
    """Let every layer hold all scores of a batch of `rows` documents of one length, as eager attention does.

    softmax(q kᵀ / √d + mask) v, softmax in float32. seen_SL: False at padding, which nobody sees: the mask
    is the lowest finite number there, as transformers' is.
    """

    def mix(own: Attention, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, run: PackedPass) -> Tensor:
        q_THd, k_TGd = (rotary(x, *run.tables(own.rope or ""), own.pairs) for x in (q_THd, k_TGd))
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGv))
        length, least = q.shape[2], torch.finfo(q.dtype).min
        hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
        if seen_SL is not None:
            hidden = hidden | ~seen_SL[:, None, None, :]
        score = q @ k.transpose(2, 3) * own.scale + torch.zeros(()).to(q).masked_fill(hidden, least)
        share = score.float().softmax(-1).to(q.dtype)
        return (share @ v).transpose(1, 2).flatten(0, 1).flatten(1)

    for layer in model.layers:
        layer.self_attn.mix = partial(mix, layer.self_attn)


def gradient(model: Decoder, batch: Batch, loss: Callable[[Decoder, Batch], Tensor] = mean_loss) -> Tensor:
    """The gradient of all parameters as one vector in float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    each = zip(parts, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten().double() for g, p in each])


def fit(
    model: Decoder,
    batches: Iterator[Batch],
    steps: int,
    rate: float,
    loss: Callable[[Decoder, Batch], Tensor] = mean_loss,
    decay: float = 0.0,
) -> list[list[float]]:
    """Train with AdamW, a warm-up of a twentieth and a cosine. -> [[step, loss], …], 40 points at most."""
    optimizer = AdamW(model, weight_decay=decay)
    schedule = Schedule(rate, steps, "cosine", warmup_steps=max(1, steps // 20))
    curve: list[list[float]] = []
    for step in range(steps):
        optimizer.zero_grad()
        of_step = loss(model, next(batches))
        of_step.backward()
        optimizer.collect()
        optimizer.update(schedule.learning_rate(step), 1.0)
        if step % max(1, steps // 40) == 0:
            curve.append([step + 1, float(of_step.detach())])
    return curve


def training_flops(model: Decoder, tokens: int) -> int:
    """6 · parameters without embeddings, and the head, per token; attention's own products are left out."""
    inner = count_parameters(model).without_embeddings + model.shape.vocab_size * model.shape.hidden_size
    return 6 * inner * tokens


def write(
    out: Path,
    value: float,
    more: dict[str, float],
    *,
    model: Decoder | None = None,
    tokens: int = 0,
    curve: Sequence[Sequence[float]] = (),
    rows: Sequence[float] = (),
) -> None:
    """Write result.json as `unfreeze lab` reads it, and print it."""
    result: dict[str, object] = {"value": value, "more": more}
    if rows:
        result["rows"] = list(rows)
    if curve:
        result["curve"] = list(curve)
    if model is not None:
        result |= {"flops": training_flops(model, tokens), "active": count_parameters(model).active}
    write_file(out / "result.json", json.dumps(result, indent=1) + "\n")
    print(f"value {value:.4g}  " + "  ".join(f"{name} {number:.4g}" for name, number in more.items()))


T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t for a two-sided interval of 95 %, by degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval) of two to ten values."""
    return statistics.mean(values), T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def differences(folder: Path) -> Iterator[str]:
    """A line for every number and arm of FOLDER/ARM/SEED/result.json, with intervals over the seeds.

    The second is that of the paired difference from the arm that ran first.
    """
    files = sorted(folder.glob("*/*/result.json"), key=lambda file: file.stat().st_mtime)
    read = {(file.parts[-3], file.parts[-2]): json.loads(file.read_text()) for file in files}
    arms = list(dict.fromkeys(arm for arm, _ in read))
    of = {key: {"value": each["value"], **each["more"]} for key, each in read.items()}
    seeds = [seed for seed in dict.fromkeys(s for _, s in read) if all((arm, seed) in of for arm in arms)]
    for name in dict.fromkeys(name for each in of.values() for name in each):
        for arm in arms:
            pairs = [
                (of[arm, s][name], of[arms[0], s][name]) for s in seeds if all(name in of[a, s] for a in arms)
            ]
            if len(pairs) < 2:
                continue
            mean, half = interval([a for a, _ in pairs])
            apart, of_apart = interval([a - b for a, b in pairs])
            line = f"{name:16} {arm:16} {mean:9.4g} ± {half:.2g}"
            yield line + (f"   {apart:+.4g} ± {of_apart:.2g} from {arms[0]}" if arm != arms[0] else "")


if __name__ == "__main__":
    print("\n".join(differences(Path(sys.argv[1]))))
