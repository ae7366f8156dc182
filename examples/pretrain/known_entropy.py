"""A language whose entropy is known, so that a loss can be compared with the best one possible.

    python examples/pretrain/known_entropy.py                # texts, tokenizer, entropy: build/known_entropy
    unfreeze pretrain examples/pretrain/known_entropy.toml   # a mixture of a million active parameters
    python examples/pretrain/known_entropy.py --check build/known_entropy/run

Each letter is drawn by the two before it, from a table that is drawn once (a second-order Markov chain).
With p the table and pi(a, b) the stationary share of the pair ab:

    H2 = - sum pi(a, b) p(c | a, b) ln p(c | a, b)        nats per letter, given two letters
    H1 = - sum pi(a, b) ln (pi(a, b) / pi(a))             of the second letter of a text, given the first

A text of L letters begins with a pair from pi, so a model that knows the language has a loss of
(H1 + (L - 2) H2) / (L - 1) nats per token: the first letter is not predicted. No model can do better, except
by luck on the rows that were held out.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

LETTERS, LENGTH = 16, 128
CONCENTRATION = 0.3  # of the Dirichlet draws: lower means that fewer letters can follow a pair
CLOSE = 0.03  # nats


def table(seed: int) -> np.ndarray:
    """p[a, b, c]: probability of letter c after ab."""
    return np.random.default_rng(seed).dirichlet(np.full(LETTERS, CONCENTRATION), size=(LETTERS, LETTERS))


def stationary(p: np.ndarray) -> np.ndarray:
    """pi[a, b], by repeated steps until nothing changes."""
    pi = np.full((LETTERS, LETTERS), 1 / LETTERS**2)
    for _ in range(100_000):
        after = np.einsum("ab,abc->bc", pi, p)
        if np.abs(after - pi).max() < 1e-15:
            break
        pi = after
    return after / after.sum()


def entropy(p: np.ndarray, pi: np.ndarray, length: int = LENGTH) -> float:
    """Loss of a perfect model, in nats per predicted letter."""
    log = np.log(np.maximum(p, 1e-300))
    second = -(pi[:, :, None] * p * log).sum()
    given_first = pi / np.maximum(pi.sum(axis=1, keepdims=True), 1e-300)
    first = -(pi * np.log(np.maximum(given_first, 1e-300))).sum()
    return float((first + (length - 2) * second) / (length - 1))


def texts(p: np.ndarray, pi: np.ndarray, count: int, seed: int, length: int = LENGTH) -> list[str]:
    """Texts of the language, all drawn at once, letter by letter."""
    drawn = np.random.default_rng(seed)
    pairs = drawn.choice(LETTERS**2, size=count, p=pi.ravel())
    letters = np.empty((count, length), dtype=np.int64)
    letters[:, 0], letters[:, 1] = pairs // LETTERS, pairs % LETTERS
    ends = p.cumsum(axis=2)
    for place in range(2, length):
        below = ends[letters[:, place - 2], letters[:, place - 1]]
        letters[:, place] = np.minimum((drawn.random((count, 1)) > below).sum(axis=1), LETTERS - 1)
    return ["".join(row) for row in np.array(list("abcdefghijklmnopqrstuvwxyz"))[letters]]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}\n")


def make(out: Path, train: int, held_out: int, seed: int) -> float:
    """Write everything. -> the entropy."""
    p = table(seed)
    pi = stationary(p)
    write_tokenizer(out / "tokenizer")
    for name, count, own in (("train", train, seed + 1), ("held_out", held_out, seed + 2)):
        lines = (json.dumps({"text": text}) + "\n" for text in texts(p, pi, count, own))
        (out / f"{name}.jsonl").write_text("".join(lines))
    best = entropy(p, pi)
    (out / "entropy.json").write_text(json.dumps({"nats_per_token": best}) + "\n")
    return best


def check(run: Path) -> int:
    """Compare a run's last held-out loss with the entropy. -> exit code."""
    best = json.loads((run.parent / "entropy.json").read_text())["nats_per_token"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    loss = [event["loss"] for event in events if event["kind"] == "eval"][-1]
    print(f"held-out loss {loss:.4f}, entropy {best:.4f}: {loss - best:+.4f} nats per token")
    if loss - best > CLOSE:
        print(f"more than {CLOSE} above the entropy", file=sys.stderr)
    return int(loss - best > CLOSE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/known_entropy"))
    parser.add_argument("--train", type=int, default=40_000, help="training texts")
    parser.add_argument("--held-out", type=int, default=400, help="held-out texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=Path, metavar="RUN", help="compare this run with the entropy")
    options = parser.parse_args()
    if options.check:
        sys.exit(check(options.check))
    print(f"entropy {make(options.out, options.train, options.held_out, options.seed):.4f} nats per token")
