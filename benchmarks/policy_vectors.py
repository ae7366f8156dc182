"""Make tests/objectives/recorded/policies.json: other trainers' own advantages, losses and gradients.

    python benchmarks/policy_vectors.py --peers FOLDER --write
    python benchmarks/policy_vectors.py --check

TRL is imported. Of the others the functions themselves are taken from their source files and executed as they
stand, so that none of their packages is installed: FOLDER/verl is the wheel of PyPI, unpacked; FOLDER/nemo,
slime, skyrl, prime-rl, openrlhf and nanochat are checkouts. Two things are changed: decorators
(torch.compile, registries) are dropped, and float32 becomes float64 where a function casts. Of tinker only a
formula is published, so it is written here.

B answers in P groups of G, S tokens of the longest.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "objectives" / "recorded" / "policies.json"
SEED, P, G, S = 0, 2, 3, 5
LENGTHS = [5, 3, 4, 2, 1, 5]
REWARDS = [[1.0, 0.25, 0.0], [0.5, 0.5, 2.0]]
SOURCES = {
    "verl": "0.9.1",
    "nemo": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "skyrl": "a9564572eb8e91076be43c1bd5e4615e3de17265",
    "prime-rl": "559b44772e471d1538537b8805cc77f3824a5e64",
    "openrlhf": "3c3be6234e0cb353e76bb8019947db9dfe99fca7",
    "nanochat": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    "tinker": "https://tinker-docs.thinkingmachines.ai/tinker/losses/importance-sampling (formula only)",
}


class Inputs(SimpleNamespace):
    """log p of the policy (a leaf), of the trainer before, of a reference, of the sampler; [B, S] each."""

    log_p: Tensor
    old: Tensor
    reference: Tensor
    sampler: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor

    @property
    def wide(self) -> Tensor:
        """The advantage of every token, [B, S]."""
        return self.advantages[:, None].expand_as(self.mask)


def inputs() -> Inputs:
    """Return numbers far enough from each other that every clip and mask cuts some tokens."""
    generator = torch.Generator().manual_seed(SEED)

    def near(values: Tensor, spread: float) -> Tensor:
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return (values + spread * noise).clamp(max=-0.01)

    log_p = -torch.rand(P * G, S, generator=generator, dtype=torch.float64) * 2 - 0.02
    steps = torch.arange(S)
    return Inputs(
        log_p=log_p.clone().requires_grad_(),
        old=near(log_p, 0.3),
        reference=near(log_p, 0.3),
        sampler=near(log_p, 0.3),
        mask=(steps[None] < torch.tensor(LENGTHS)[:, None]).double(),
        advantages=torch.tensor([1.0, -0.5, 0.25, -0.75, 0.5, -1.25], dtype=torch.float64),
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
    )


class _Plain(ast.NodeTransformer):
    """Drops decorators and annotations, and widens casts to float32."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        keep = ("staticmethod", "property")
        node.decorator_list = [each for each in node.decorator_list if getattr(each, "id", "") in keep]
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = {"float32": "float64", "float": "float64"}.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            node.func.attr = "double"
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.generic_visit(ast.Assign([node.target], node.value))


def run(body: Sequence[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """Execute statements with these names, and return all names afterwards."""
    module = ast.Module([_Plain().visit(statement) for statement in body], [])
    exec(compile(ast.fix_missing_locations(module), "peer", "exec"), names)
    return names


def take(path: Path, wanted: Sequence[str], **names: Any) -> SimpleNamespace:
    """Return functions and classes of a source file; `names` stands for what the file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in tree.body if isinstance(node, kinds) and node.name in wanted]
    assert len(body) == len(wanted), f"{path} has not all of {wanted}"
    return SimpleNamespace(**run(body, {"torch": torch, "Optional": None, "np": np, **names}))


def statements(path: Path, first: str, last: str) -> list[ast.stmt]:
    """Return statements of one block: from the one that begins with `first` to that with `last`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            texts = [ast.unparse(statement) for statement in block]
            starts = [i for i, text in enumerate(texts) if text.startswith(first)]
            ends = [i for i, text in enumerate(texts) if text.startswith(last)]
            if starts and ends and starts[0] <= ends[0]:
                return block[starts[0] : ends[0] + 1]
    raise LookupError(f"{path} has no statements from {first!r} to {last!r}")


def case(loss: Callable[[Inputs], Tensor], x: Inputs | None = None) -> dict[str, Any]:
    """Return a loss and its gradient by log p."""
    x = x or inputs()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x.log_p)
    return {"loss": value.item(), "gradient": gradient.tolist()}


# ---- TRL


class _Alone:
    num_processes, sync_gradients = 1, True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def trl_loss(x: Inputs, loss_type: str, **options: Any) -> Tensor:
    """_compute_loss of GRPOTrainer, or of RLOOTrainer for "rloo", with a stand-in for the trainer."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    weight = options.get("weight")
    off = ("aux_loss_enabled", "_entropy_bonus_enabled")
    arguments = SimpleNamespace(steps_per_generation=1, delta=None, use_bias_correction_kl=False)
    arguments.sapo_temperature_pos, arguments.sapo_temperature_neg = 1.0, 1.05
    trainer = SimpleNamespace(
        **dict.fromkeys(off, False),
        args=arguments,
        loss_type=loss_type,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        epsilon_low=0.2,
        epsilon_high=options.get("high", 0.2),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weight is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=8,
        current_gradient_accumulation_steps=1,
        accelerator=_Alone(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (x.log_p, torch.zeros_like(x.log_p), None),
    )
    batch = {
        "prompt_ids": torch.zeros(len(x.mask), 2).long(),
        "prompt_mask": torch.ones(len(x.mask), 2),
        "completion_ids": torch.zeros(x.mask.shape).long(),
        "completion_mask": x.mask,
        "advantages": x.advantages,
        "old_per_token_logps": x.old,
        "old_logps": (x.old * x.mask).sum(1),
        "ref_per_token_logps": x.reference,
        "num_items_in_batch": x.mask.sum(),
        "importance_sampling_ratio": weight,
    }
    trains = RLOOTrainer if loss_type == "rloo" else GRPOTrainer
    return trains._compute_loss(trainer, None, batch)  # type: ignore[arg-type]


def trl_advantages(rewards: Tensor, scale: str) -> Tensor:
    """The statements of _generate_and_score_completions from the summed rewards to the advantages."""
    from trl.trainer import grpo_trainer
    from trl.trainer.utils import nanstd

    body = statements(Path(grpo_trainer.__file__), "rewards = (rewards_per_func", "advantages = rewards -")
    follow = statements(Path(grpo_trainer.__file__), "advantages = rewards -", "if self.scale_rewards != ")
    names = {
        "self": SimpleNamespace(reward_weights=torch.ones(1), scale_rewards=scale, num_generations=G),
        "rewards_per_func": rewards.reshape(-1, 1),
        "unscorable_mask": torch.zeros(P * G).bool(),
        "num_generations": G,
        "device": "cpu",
        "torch": torch,
        "nanstd": nanstd,
        "mode": "train",
    }
    return run([*body, *follow[1:]], names)["advantages"]


def trl() -> dict[str, Any]:
    x = inputs()
    token = (x.old - x.sampler).exp().detach()
    mean = (((x.old - x.sampler) * x.mask).sum(1) / x.mask.sum(1))[:, None].exp()
    summed = ((x.old - x.sampler) * x.mask).sum(1, keepdim=True).exp()
    variants: dict[str, Callable[[Inputs], Tensor]] = {
        "grpo": lambda x: trl_loss(x, "grpo"),
        "dapo": lambda x: trl_loss(x, "dapo"),
        "dr_grpo": lambda x: trl_loss(x, "dr_grpo"),
        "bnpo": lambda x: trl_loss(x, "bnpo"),
        "cispo": lambda x: trl_loss(x, "cispo", high=1.3),
        "sapo": lambda x: trl_loss(x, "sapo"),
        "gspo": lambda x: trl_loss(x, "grpo", level="sequence"),
        "kl": lambda x: trl_loss(x, "dapo", beta=0.04),
        "token TIS": lambda x: trl_loss(x, "dapo", weight=token.clamp(max=1.2)),
        "answer TIS": lambda x: trl_loss(x, "dapo", weight=summed.clamp(max=1.2).expand_as(x.mask)),
        "token mask": lambda x: trl_loss(x, "dapo", weight=((token > 0.8) & (token < 1.25)).double()),
        "answer mask": lambda x: trl_loss(x, "dapo", weight=((mean > 0.9) & (mean < 1.1)).double()),
        "rloo": lambda x: trl_loss(x, "rloo"),
    }
    scales = {
        scale: trl_advantages(x.rewards, scale).view(P, G).tolist() for scale in ("group", "batch", "none")
    }
    return {
        "version": version("trl"),
        "advantages": scales,
        "cases": {n: case(f) for n, f in variants.items()},
    }


# ---- the others


def grpo_by_index(function: Callable[..., Any], x: Inputs) -> list[list[float]]:
    """An estimator of verl's signature, on rewards at the last token."""
    rewards = torch.zeros_like(x.mask)
    rewards[:, 0] = x.rewards.flatten()
    advantage, _ = function(rewards, torch.ones_like(x.mask), np.arange(P).repeat(G))
    return advantage[:, 0].view(P, G).tolist()


def verl(folder: Path) -> dict[str, Any]:
    masked = take(folder / "verl/utils/torch_functional.py", ["masked_sum", "masked_mean"])
    core = take(
        folder / "verl/trainer/ppo/core_algos.py",
        ["agg_loss", "compute_policy_loss_vanilla", "compute_grpo_outcome_advantage", "kl_penalty_forward"],
        verl_F=masked,
        AlgoConfig=type("AlgoConfig", (), {}),
        defaultdict=defaultdict,
    )
    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}

    class Config(SimpleNamespace):
        def get(self, name: str, default: Any = None) -> Any:
            return getattr(self, name, default)

    def loss(x: Inputs) -> Tensor:
        config = Config(**settings, global_batch_info={})
        return core.compute_policy_loss_vanilla(x.old, x.log_p, x.wide, x.mask, "token-mean", config)[0]

    far = inputs()
    far.old = far.old - 1.5 * (far.advantages < 0).double()[:, None]  # ratios above the dual limit
    return {
        "advantages": {"group": grpo_by_index(core.compute_grpo_outcome_advantage, inputs())},
        "cases": {"default": case(loss), "dual": case(loss, far)},
    }


def nemo(folder: Path) -> dict[str, Any]:
    algorithms = folder / "nemo_rl/algorithms"
    helpers = ["calculate_kl", "masked_mean", "calculate_baseline_and_std_per_prompt"]
    utils = take(algorithms / "utils.py", helpers)
    names = {"LossFunction": object, "Tensor": Tensor, **vars(utils)}
    stand_ins = {name: MagicMock() for name in ("LossType", "LossInputType", "MetricNormalizer")}
    losses = take(algorithms / "loss/loss_functions.py", ["ClippedPGLossFn"], **names, **stand_ins)
    estimators = take(algorithms / "advantage_estimator.py", ["GRPOAdvantageEstimator"], **vars(utils))
    options = {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "positive_example_nll_weight": 0.0,
        "ratio_clip_c": None,
    }
    cut = "truncated_importance_sampling_"
    options |= dict.fromkeys((cut + "type", cut + "ratio", cut + "ratio_min"))
    off = ("disable_ppo_ratio", "use_kl_in_reward", "use_importance_sampling_correction", "use_cispo")
    off += ("use_on_policy_kl_approximation", "force_on_policy_ratio", "sequence_level_importance_ratios")
    config = SimpleNamespace(**options, **dict.fromkeys(off, False))

    def padded(values: Tensor) -> Tensor:
        return torch.cat([values[:, :1], values], 1)

    def loss(x: Inputs) -> Tensor:
        data = {
            "input_ids": torch.zeros(P * G, S + 1).long(),
            "advantages": padded(x.wide),
            "prev_logprobs": padded(x.old),
            "generation_logprobs": padded(x.sampler),
            "reference_policy_logprobs": padded(x.reference),
            "token_mask": padded(x.mask),
            "sample_mask": torch.ones(P * G).double(),
        }
        return losses.ClippedPGLossFn(config)(x.log_p, data, torch.tensor(P * G), x.mask.sum())[0]

    estimator = estimators.GRPOAdvantageEstimator(
        SimpleNamespace(use_leave_one_out_baseline=True, normalize_rewards=True), None
    )
    x = inputs()
    prompts = torch.arange(P).repeat_interleave(G)[:, None]
    advantage = estimator.compute_advantage(prompts, x.rewards.flatten(), torch.ones(P * G, 1))
    return {"advantages": {"group": advantage.view(P, G).tolist()}, "cases": {"default": case(loss)}}


def slime(folder: Path) -> dict[str, Any]:
    ppo = take(folder / "slime/utils/ppo_utils.py", ["compute_policy_loss"])
    mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    path = folder / "slime/backends/megatron_utils/cp_utils.py"
    cp = take(path, ["get_sum_of_sample_mean"], mpu=mpu)

    def loss(x: Inputs) -> Tensor:
        each, _ = ppo.compute_policy_loss(x.old - x.log_p, x.wide, 0.2, 0.2, None)
        masks, lengths = list(x.mask), [S] * (P * G)
        return cp.get_sum_of_sample_mean(lengths, lengths, masks)(each.flatten()) / (P * G)

    x = inputs()
    settings = SimpleNamespace(advantage_estimator="grpo", n_samples_per_prompt=G, rollout_batch_size=P)
    settings.rewards_normalization = settings.grpo_std_normalization = True
    names = {
        "self": SimpleNamespace(args=settings),
        "raw_rewards": x.rewards.flatten().tolist(),
        "torch": torch,
    }
    body = statements(
        folder / "slime/ray/rollout.py", "rewards = torch.tensor(raw_rewards", "if self.args.adv"
    )
    advantage = run(body, names)["rewards"]
    return {"advantages": {"group": advantage.tolist()}, "cases": {"default": case(loss)}}


def skyrl(folder: Path) -> dict[str, Any]:
    utils = folder / "skyrl/backends/skyrl_train/utils"
    pieces = take(utils / "torch_utils.py", ["masked_mean", "safe_exp_delta"])
    corrections = take(utils / "off_policy_correction_utils.py", ["apply_off_policy_correction"], Tuple=tuple)
    wanted = ["ppo_policy_loss", "reduce_loss", "compute_approx_kl", "compute_grpo_outcome_advantage"]
    wanted += ["apply_loss_reduction_to_advantages_minibatch"]
    names = {**vars(pieces), **vars(corrections), "defaultdict": defaultdict}
    ppo = take(utils / "ppo_utils.py", wanted, **{**names, "torch": torch})
    config = SimpleNamespace(
        policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=None
    )

    def loss(x: Inputs, beta: float = 0.0) -> Tensor:
        scaled = ppo.apply_loss_reduction_to_advantages_minibatch(x.wide, x.mask, "token_mean", P * G, S)
        policy, _ = ppo.ppo_policy_loss(x.log_p, x.old, scaled, config, x.mask)
        kl = ppo.compute_approx_kl(x.log_p, x.reference, x.mask, "k3")
        return policy + beta * pieces.masked_mean(kl, x.mask, dim=-1).mean()

    even = inputs()
    even.mask = torch.ones_like(even.mask)  # its KL is a mean over answers, its loss one over tokens
    advantage = grpo_by_index(ppo.compute_grpo_outcome_advantage, inputs())
    cases = {"without KL": case(loss), "even lengths": case(lambda x: loss(x, 0.001), even)}
    return {"advantages": {"group": advantage}, "cases": cases}


def prime(folder: Path) -> dict[str, Any]:
    path = folder / "src/prime_rl/trainer/rl/loss.py"
    helpers = ["_safe_mean", "compute_importance_ratio_and_mismatch_kl", "default_loss_fn"]
    losses = take(path, helpers, LossOutputs=SimpleNamespace)
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)

    def loss(x: Inputs) -> Tensor:
        total = x.log_p.new_zeros(())
        for row in range(P * G):
            sample = SimpleNamespace(trainer_logprobs=x.log_p[row], inference_logprobs=x.sampler[row])
            sample.advantages, sample.loss_mask, sample.loss_weights = x.wide[row], x.mask[row].bool(), None
            total = total + losses.default_loss_fn(sample, config).loss
        return total / x.mask.sum()

    path = folder / "src/prime_rl/orchestrator/algo/grpo.py"
    groups = []
    for group in REWARDS:
        traces = [SimpleNamespace(reward=reward) for reward in group]
        body = statements(path, "rewards = torch.tensor", "length_penalty = ")
        body += statements(
            path, "advantages = rewards - rewards.mean()", "advantages = rewards - rewards.mean()"
        )
        names = {"traces": traces, "torch": torch, "self": SimpleNamespace(length_penalty=None)}
        groups.append(run(body, names)["advantages"].tolist())
    return {"advantages": {"none": groups}, "cases": {"default": case(loss)}}


def openrlhf(folder: Path) -> dict[str, Any]:
    models = folder / "openrlhf/models"
    utils = take(models / "utils.py", ["masked_mean", "compute_approx_kl"])
    names = {"nn": torch.nn, "masked_mean": utils.masked_mean}
    losses = take(models / "loss.py", ["PolicyLoss", "aggregate_loss"], **names)

    def loss(x: Inputs) -> Tensor:
        policy, *_ = losses.PolicyLoss(0.2, 0.2)(x.log_p, x.old, x.wide, action_mask=x.mask)
        kl = utils.compute_approx_kl(x.log_p, x.reference, "k3")
        return policy + 1e-3 * losses.aggregate_loss(kl, x.mask)

    path = folder / "openrlhf/trainer/ppo_utils/experience_maker.py"
    line = "rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std"
    advantage = run(statements(path, line, line), {"rewards": inputs().rewards})["rewards"]
    return {"advantages": {"group": advantage.tolist()}, "cases": {"default": case(loss)}}


def nanochat(folder: Path) -> dict[str, Any]:
    path = folder / "scripts/chat_rl.py"
    pass_body = statements(path, "logp = -model(", "loss = -pg_obj")

    def loss(x: Inputs) -> Tensor:
        names = {
            "model": lambda *_, **__: -x.log_p * x.mask,
            "inputs": x.mask,
            "targets": torch.where(x.mask.bool(), 1, -1),
            "advantages": x.advantages,
            "num_passes": 1,
            "examples_per_rank": 1,
        }
        return run(pass_body, names)["loss"]

    groups = []
    for group in REWARDS:
        names = {"rewards": torch.tensor(group, dtype=torch.float64)}
        groups.append(
            run(statements(path, "mu = rewards.mean()", "advantages = "), names)["advantages"].tolist()
        )
    return {"advantages": {"none": groups}, "cases": {"default": case(loss)}}


def tinker(folder: Path) -> dict[str, Any]:
    def loss(x: Inputs) -> Tensor:
        return -((x.log_p - x.sampler).exp() * x.wide * x.mask).sum()

    centred = [[reward - sum(group) / len(group) for reward in group] for group in REWARDS]
    return {"advantages": {"none": centred}, "cases": {"default": case(loss)}}


PEERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "verl": verl,
    "nemo": nemo,
    "slime": slime,
    "skyrl": skyrl,
    "prime-rl": prime,
    "openrlhf": openrlhf,
    "nanochat": nanochat,
    "tinker": tinker,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="without it: TRL alone, which is installed")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    x = inputs()
    tensors = {name: value.tolist() for name, value in vars(x).items()}
    peers = {"trl": trl()}
    for name, function in PEERS.items() if arguments.peers else ():
        peers[name] = {"version": SOURCES[name], **function(arguments.peers / name)}
    if arguments.write:
        content = {"torch": torch.__version__, "seed": SEED, "inputs": tensors, "peers": peers}
        RECORDED.write_text(json.dumps(content) + "\n", encoding="utf-8")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["peers"]
    for name, peer in peers.items():
        losses = {label: each["loss"] for label, each in peer["cases"].items()}
        print(name, {label: round(loss, 9) for label, loss in losses.items()})
        then = recorded[name]
        apart = max(abs(loss - then["cases"][label]["loss"]) for label, loss in losses.items())
        if arguments.check and apart > 1e-9:
            sys.exit(f"{name} {peer['version']} is {apart:.1e} from what {then['version']} gave")


if __name__ == "__main__":
    main()
