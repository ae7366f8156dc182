"""N1 to N9: faults of numerics, labels, vocabulary and decoding. T tokens, V vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze import models
from unfreeze.config.parse import parse
from unfreeze.core.batch import Batch
from unfreeze.data import encode_file, load_tokenizer, pack
from unfreeze.data.tokens.turns import Renderer
from unfreeze.drill.fault import Fault, Outcome, Unnamed, measured, must_refuse, said
from unfreeze.drill.sandbox import ROWS, VOCAB, Sandbox
from unfreeze.evaluate.perplexity import heldout
from unfreeze.generate.engine import Engine
from unfreeze.generate.model import Model
from unfreeze.generate.sampling import Sampling
from unfreeze.kernels.rms_norm import rms_norm
from unfreeze.models import Decoder
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.recipes.sft import Config as SftConfig
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

# (document lengths, supervised targets of each); one document has none
SKEWED = ([90, 7, 3, 41, 12, 5, 66, 30], [2, 6, 2, 40, 1, 0, 60, 3])
GREEDY_TOKENS = 256
LIMIT = 1e-6  # relative difference of float32 gradients


def zero_row_tiny_eps(sandbox: Sandbox) -> Outcome:
    """Normalise a zero embedding row with eps 1e-8: in float16 eps is 0, and 0 / 0 is NaN."""
    x_TD, weight_D = torch.zeros(2, 32), torch.ones(32)
    half = x_TD.half()
    wrong = half * torch.rsqrt(half.square().mean(-1, keepdim=True) + torch.tensor(1e-8).half())
    ours = [rms_norm(x_TD.to(dtype), weight_D.to(dtype), 1e-8) for dtype in (torch.float32, torch.bfloat16)]
    finite = all(bool(y.isfinite().all()) for y in ours)
    line = (
        f"zero rows, eps 1e-8: norm in float16 gives {float(wrong[0, 0])}, ours (fp32 inside)"
        f" {float(ours[0][0, 0])} and {float(ours[1][0, 0])}"
    )
    return measured(rms_norm, line, holds=finite)


def nan_where_nothing_is_supervised(sandbox: Sandbox) -> Outcome:
    """Plant a NaN in the last MLP at a position without loss: the loss is finite, all gradients are NaN."""
    model, batch = sandbox.model("llama"), sandbox.batch([12, 9], [4, 3])
    # last position of the second document: it has no target, and no later position attends to it
    last = torch.tensor([20])

    def planted(module: object, inputs: object, y_TD: Tensor) -> Tensor:
        return y_TD.index_fill(0, last, float("nan"))

    model.layers[-1].mlp.register_forward_hook(planted)
    with torch.no_grad():
        loss = float(cross_entropy(model.hidden(batch), model.lm_head, batch).sum)
    if loss != loss:
        raise Unnamed("the planted NaN reached the loss, but should not")
    return must_refuse(
        lambda: sandbox.loop(model, [[batch]], steps=2),
        says="NaN first at model.layers.1.mlp, 1 of 21 positions, none supervised",
    )


def row_cut_before_its_answer(sandbox: Sandbox) -> Outcome:
    """Encode six rows; row 3 has a prompt as long as the sequence."""
    rows = [*ROWS[:2], {"question": "frog " * 300, "answer": "Hmm."}, *ROWS[2:]]
    dataset = encode_file(sandbox.rows(rows), sandbox.tokenizer, 512)
    return said(
        encode_file,
        "; ".join(bad.reason for bad in dataset.stats.listed),
        says="row 3: 0 of 512 tokens supervised",
    )


def empty_micro_batch(sandbox: Sandbox) -> Outcome:
    """Train on two micro-batches, one without loss: the gradient must be that of the other."""
    full, empty = sandbox.batch([30, 20]), sandbox.batch([25], [0], seed=1)
    alone, both = gradient(sandbox, [full]), gradient(sandbox, [full, empty])
    finite = bool(both.isfinite().all())
    return measured(
        train_step,
        f"gradient with and without the empty micro-batch differs by {relative(both, alone):.1g} (relative); "
        f"{'finite' if finite else 'not finite'}",
        holds=finite and relative(both, alone) <= LIMIT,
    )


def mean_of_means(sandbox: Sandbox) -> Outcome:
    """Compare gradients of the same documents in 1, 2, 4 or 8 micro-batches.

    Also compute them the wrong way, as the mean of the micro-batches' means.
    """
    examples = sandbox.examples(*SKEWED)
    whole = gradient(sandbox, [pack(examples)])
    worst = max(
        relative(gradient(sandbox, [pack(part) for part in cut_sequences(examples, pieces)]), whole)
        for pieces in (2, 4, 8)
    )
    wrong = torch.stack([gradient(sandbox, [pack(part)]) for part in cut_sequences(examples, 4)]).mean(0)
    line = (
        f"gradients over 1, 2, 4 and 8 micro-batches, packed and one by one, differ by at most {worst:.1g}"
        f" (limit {LIMIT:g}); a mean of 4 means would be off by {100 * relative(wrong, whole):.0f} %"
    )
    return measured(train_step, line, holds=worst <= LIMIT and relative(wrong, whole) > 0.1)


def cut_sequences(examples: Sequence, pieces: int) -> list[Sequence]:
    size = len(examples) // pieces
    return [examples[at : at + size] for at in range(0, len(examples), size)]


def gradient(sandbox: Sandbox, batches: list[Batch]) -> Tensor:
    """Gradient of one optimizer step, all parameters concatenated."""
    model = sandbox.model("llama")
    optimizer = AdamW(model)
    train_step(
        model,
        optimizer,
        batches,
        cross_entropy,
        learning_rate=1e-9,
        max_norm=0.0,
        recompute=models.keep_inputs,
    )
    gradients = (optimizer.gradient(name) for name in optimizer.parameters)
    return torch.cat([g.flatten().double() for g in gradients if g is not None])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def labels_shifted_twice(sandbox: Sandbox) -> Outcome:
    """Compute the loss of a model that knows the next token: 0 with labels shifted once.

    With labels shifted twice, or not at all, it is above 0.
    """
    documents = sandbox.examples([40, 25, 9])
    batch = pack(documents)
    # from the documents, not from the batch
    follows = torch.cat([torch.tensor([*list(doc.tokens[1:]), 0]) for doc in documents])
    logits_TV = 20.0 * F.one_hot(follows, 256)

    def loss(targets_T: Tensor) -> float:
        return float(
            (F.cross_entropy(logits_TV.float(), targets_T, reduction="none") * batch.weights_T).sum()
            / batch.weights_T.sum()
        )

    once, twice, none = loss(batch.targets_T), loss(batch.targets_T.roll(-1)), loss(batch.tokens_T)
    line = (
        f"a model that knows the next token has loss {once:.3f} on our labels, {twice:.1f} on labels shifted"
        f" twice, {none:.1f} unshifted"
    )
    return measured(pack, line, holds=once < 1e-3 < 1 < min(twice, none))


def mask_lost(sandbox: Sandbox) -> Outcome:
    """Check the supervised text of a conversation: answers with end tokens, nothing else.

    The expected text is rendered from the messages.
    """
    messages = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "tiny-k2, I am."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Hmm."},
    ]
    dataset = encode_file(sandbox.rows([{"messages": messages}]), sandbox.tokenizer, 512)
    example = dataset.examples[0]
    taught = [token for token, weight in zip(example.tokens, example.weights, strict=True) if weight]
    text = sandbox.tokenizer.decode(taught, skip_specials=False)
    expected = "".join(f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant")
    line = f"{100 * dataset.stats.supervised_fraction:.1f} % supervised; the supervised text is {text!r}"
    return measured(Renderer, line, holds=text == expected)


def unstable_template(sandbox: Sandbox) -> Outcome:
    """Render a conversation as one example with a template that numbers turns from the end.

    Earlier turns then change as the conversation grows.
    """
    template = (
        "{% for m in messages %}[{{ messages | length - loop.index0 }}]{{ m.role }}: {{ m.content }}\n{%"
        " endfor %}"
    )
    folder = sandbox.copy("llama")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return must_refuse(
        lambda: encode_file(sandbox.rows(), load_tokenizer(folder), 512, turns="whole"),
        says="not prefix-stable",
    )


def mask_all_ones(sandbox: Sandbox) -> Outcome:
    """Render with a template whose generation marks surround the whole conversation.

    It counts its messages, so only the marks can give the loss mask.
    """
    marked = (
        "{% generation %}{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content"
        " }}<|im_end|>{% endfor %}{% endgeneration %}"
    )
    folder = sandbox.copy("llama")
    (folder / "chat_template.jinja").write_text(marked, encoding="utf-8")
    return must_refuse(
        lambda: encode_file(sandbox.rows(), load_tokenizer(folder), 512),
        says="the loss mask of the chat template covers it",
    )


def tokenizer_larger_than_embedding(sandbox: Sandbox) -> Outcome:
    config = {**sandbox.config("llama"), "vocab_size": VOCAB - 36}
    folder = sandbox.write(config, sandbox.fresh("small-vocab"))
    return must_refuse(lambda: sandbox.sft(model=folder), says="36 ids have no embedding")


def padded_head(sandbox: Sandbox) -> Outcome:
    """Sample from a head with 64 rows more than the tokenizer has ids; their logits are the highest."""
    config = {**sandbox.config("llama"), "vocab_size": VOCAB + 64}
    model = sandbox.open(sandbox.write(config, sandbox.fresh("padded")))
    with torch.no_grad():
        hidden_TD = model.hidden(sandbox.batch([8]))
        model.lm_head.weight[VOCAB:] = 50 * F.normalize(hidden_TD[-1], dim=0)
    free, named = (
        Engine(model, tokenizer=tokenizer).generate(
            [[1, 2, 3]] * 4, Sampling(max_new_tokens=32, temperature=1.0, seed=0)
        )
        for tokenizer in (None, sandbox.tokenizer)
    )
    counts = [sum(token >= VOCAB for row in rows for token in row.tokens) for rows in (free, named)]
    line = (
        f"64 padded rows of the head: sampled {counts[1]} times in 128 tokens with the tokenizer's limit,"
        f" {counts[0]} times without it"
    )
    return measured(Engine, line, holds=counts[1] == 0 < counts[0])


def pad_is_eos(sandbox: Sandbox) -> Outcome:
    """Set pad_token to the end token: a collator that masks padding would never train the end."""
    folder = sandbox.copy("llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["pad_token"] = "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    examples = encode_file(sandbox.rows(ROWS[:5]), tokenizer, 512).examples
    batch = pack(examples)
    ends = [
        int(batch.targets_T[i]) in tokenizer.eos_ids for i in batch.weights_T.nonzero().flatten().tolist()
    ]
    model = memorised(sandbox, batch)
    prompts = [list(e.tokens[: next(i for i, weight in enumerate(e.weights) if weight)]) for e in examples]
    engine = Engine(model, tokenizer=tokenizer, stop_ids=tokenizer.eos_ids)
    answers = engine.generate(prompts, Sampling(max_new_tokens=64))
    ended = sum(answer.finish_reason == "stop" for answer in answers)
    line = (
        f"pad = end: the end of {sum(ends)} of {len(examples)} answers still carries loss; after training"
        f" {ended} of {len(answers)} answers stop"
    )
    return measured(pack, line, holds=sum(ends) == len(examples) and ended / len(answers) >= 0.99)


def memorised(sandbox: Sandbox, batch: Batch) -> Decoder:
    model = sandbox.model("llama")
    optimizer = AdamW(model)
    for _ in range(60):
        train_step(
            model, optimizer, [batch], cross_entropy, learning_rate=1e-2, max_norm=1.0, recompute=models.plain
        )
    return model


def partial_logits_key(sandbox: Sandbox) -> Outcome:
    toml = sandbox.fresh("run").with_suffix(".toml")
    toml.write_text('model = "m"\ndata = "d"\nnum_logits_to_keep = 1\n', encoding="utf-8")
    return must_refuse(
        lambda: parse(SftConfig, [str(toml)], command="sft", description=""),
        says="unknown key num_logits_to_keep",
    )


def partial_logits(sandbox: Sandbox) -> Outcome:
    """Set num_logits_to_keep in config.json: every supervised token must still count."""
    config = {**sandbox.config("llama"), "num_logits_to_keep": 1, "logits_to_keep": 1}
    model, batch = sandbox.open(sandbox.write(config, sandbox.fresh("keep-one"))), sandbox.batch([30, 20])
    supervised = batch.weights_T.nonzero().flatten()
    with torch.no_grad():
        loss = cross_entropy(model.hidden(batch), model.lm_head, batch)
    last = replace(batch, weights_T=torch.zeros_like(batch.weights_T).index_fill(0, supervised[-1:], 1.0))
    off = relative(gradient(sandbox, [last]), gradient(sandbox, [batch]))
    line = (
        f"loss over {loss.count:.0f} of {len(supervised)} supervised tokens; over the last one alone"
        f" the gradient would be {100 * off:.0f} % off"
    )
    return measured(cross_entropy, line, holds=float(loss.count) == len(supervised) and off > 0.1)


def perplexity_by_batch(sandbox: Sandbox) -> Outcome:
    """Measure held-out perplexity of documents of skewed lengths in batches of 1, 4 and 16.

    Also compute it the wrong way, as the mean of the batches' means.
    """
    model = sandbox.model("llama")
    examples = sandbox.examples([5, 60, 9, 33, 71, 3, 14, 50, 8, 21, 45, 6, 90, 11, 4, 28])
    batches = {size: [pack(examples[at : at + size]) for at in range(0, 16, size)] for size in (1, 4, 16)}
    perplexities = {size: heldout(model, parts).perplexity for size, parts in batches.items()}
    means = [heldout(model, [part]).loss for part in batches[1]]
    spread = max(perplexities.values()) / min(perplexities.values()) - 1
    wrong = abs(torch.tensor(means).mean().exp() / perplexities[1] - 1)
    line = (
        f"perplexity in batches of 1, 4, 16: {perplexities[1]:.4f}, spread {spread:.1g} (limit 1e-6); a"
        f" mean of batch means would be {100 * wrong:.1f} % off"
    )
    return measured(heldout, line, holds=spread <= 1e-6)


def cache_differs(sandbox: Sandbox) -> Outcome:
    """Compare 256 greedy tokens with KV cache, single and batched, with one packed pass without cache."""
    prompts = [[5, 17, 3, 88], [11], [60, 61, 62, 63, 64, 65, 66]]
    counts = []
    agree = True
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        model = Model(sandbox.model(family))
        sampling = Sampling(max_new_tokens=GREEDY_TOKENS)
        batched = [done.tokens for done in model.engine.generate(prompts, sampling)]
        single = model.engine.generate(prompts[:1], sampling)[0].tokens
        best = [
            logits.argmax(-1).tolist()
            for logits in model.logits(
                [[*prompt, *ids] for prompt, ids in zip(prompts, batched, strict=True)]
            )
        ]
        uncached = [ids[len(prompt) - 1 : -1] for prompt, ids in zip(prompts, best, strict=True)]
        wrong = sum(
            a != b
            for one, other in [(single, batched[0]), *zip(batched, uncached, strict=True)]
            for a, b in zip(one, other, strict=True)
        )
        agree &= wrong == 0
        counts.append(f"{family} {wrong}")
    return measured(
        Engine,
        f"tokens that differ in 3 x {GREEDY_TOKENS} greedy steps, cached, batched or uncached:"
        f" {', '.join(counts)}",
        holds=agree,
    )


FAULTS = [
    Fault("N1", "a zero row and a tiny norm eps", zero_row_tiny_eps),
    Fault("N1", "NaN only at unsupervised positions", nan_where_nothing_is_supervised),
    Fault("N2", "a row cut before its answer", row_cut_before_its_answer),
    Fault("N2", "a micro-batch without supervised tokens", empty_micro_batch),
    Fault("N3", "gradient accumulation as a mean of means", mean_of_means),
    Fault("N4", "labels shifted twice, or not at all", labels_shifted_twice),
    Fault("N4", "a loss mask lost in a refactor", mask_lost),
    Fault("N4", "a template that rewrites earlier turns", unstable_template),
    Fault("N4", "a mask of all ones", mask_all_ones),
    Fault("N5", "a tokenizer with more ids than the embedding", tokenizer_larger_than_embedding),
    Fault("N5", "padded rows of the head sampled", padded_head),
    Fault("N6", "pad = eos, so that the end is never learned", pad_is_eos),
    Fault("N7", "num_logits_to_keep in the training config", partial_logits_key),
    Fault("N7", "num_logits_to_keep in the checkpoint's config", partial_logits),
    Fault("N8", "perplexity that depends on the batch size", perplexity_by_batch),
    Fault("N9", "cached decoding that differs from uncached", cache_differs),
]
