"""unfreeze plan: a config.json alone is enough, flags win over a run's file, refusals say what fits."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unfreeze.commands import plan
from unfreeze.commands.opened import Opened
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.process import PROCESS
from unfreeze.kernels import cards
from unfreeze.kernels.attention import workspace

TINY_K2 = Path(plan.__file__).resolve().parents[1] / "assets" / "tiny-k2"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""Llama-3.1-405B's published sizes, without its scaled rotation."""
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B's published sizes."""


@pytest.fixture(scope="module", autouse=True)
def packed_once():
    """A refusal packs 18,867 tensors of a config.json, to say what fits then: 3 s, and here once for each config."""
    known, make = {}, Opened.packed

    def packed(self, to, modules):
        if self.start.tensors or self.second or self.answers:
            return make(self, to, modules)
        key = json.dumps(self.start.config, sort_keys=True), to, modules
        if key not in known:
            known[key] = make(self, to, modules)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opened, "packed", packed)
        yield


@pytest.fixture(scope="module", autouse=True)
def built_once():
    """Of one config.json alone the model of shapes and its sizes are the same in every plan."""
    known, open_ = {}, plan.open_for_plan

    def opened(*given):
        found = open_(*given)
        if not found.start.tensors:
            key = json.dumps(found.start.config, sort_keys=True)
            found.models, found.known_sizes = known.setdefault(key, (found.models, found.known_sizes))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "open_for_plan", opened)
        yield


@pytest.fixture(autouse=True)
def kernels_once(monkeypatch):
    """Hundreds of layouts of a search ask which attention runs: a third of its time on a CPU, and always the same."""
    asked = functools.cache(lambda device, *kind, find=workspace.by_record: find(workspace.OP, device, *kind))
    monkeypatch.setattr(workspace, "by_record", lambda op, *kind: asked(*kind))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return str(path)


def planned(*arguments):
    return plan.main(list(arguments), Common(quiet=True))


def said(capsys, *arguments):
    found = plan.main(list(arguments), Common())
    return found, capsys.readouterr().out.splitlines()


def test_what_does_not_fit_ends_with_exit_code_2_and_its_json_is_whole(config, tmp_path):
    refused = planned("--model", config, "--hardware", "1xRTX4090")
    fits = planned("--model", config, "--hardware", "1xH200")
    assert not refused["fits"] and refused["exit_code"] == 2
    assert fits["fits"] and refused.keys() - {"exit_code"} == fits.keys()
    # of several machines one is enough
    both = planned("--model", config, "--hardware", "1xRTX4090", "1xH200")
    assert "exit_code" not in both and [each["fits"] for each in both["plans"]] == [False, True]


def test_what_is_not_built_is_said_first(tmp_path, capsys):
    """And it ends as what does not fit: a script would start the run."""
    (tmp_path / "dense.json").write_text(json.dumps(LLAMA))
    found, lines = said(capsys, "--model", str(tmp_path / "dense.json"), "--hardware", "1xH100+1TB")
    assert found["fits"] and found["not_built"] == ["other frozen weights streamed from host memory"]
    assert found["exit_code"] == 2
    assert lines[0].endswith(f": not built yet: {', '.join(found['not_built'])}; it would fit")
    assert "not built" not in "".join(lines[1:])


def test_the_model_may_come_first(config, tmp_path, monkeypatch):
    """A config.json, a folder, an id; a run's TOML file as before."""
    wanted = planned("--model", config, "--hardware", "1xH200")
    assert planned(config, "--hardware", "1xH200") == wanted
    folder = str(Path(config).parent)
    assert planned(folder, "--hardware", "1xH200") == wanted | {"model": folder}
    with pytest.raises(ConfigError, match="is a model, and --model names one too"):
        planned(config, "--model", config)
    with pytest.raises(ConfigError, match="is not a file"):
        planned(str(tmp_path / "absent.json"))
    broken = tmp_path / "run.toml"
    broken.write_text("model")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        planned(str(broken))


def test_places_are_planned_as_they_are_named_by_flags_and_by_a_file(config, tmp_path):
    """What is chosen without them is another: experts on the device, which is fastest."""
    asked = ["--hardware", "8xH200+1TB"]
    free = planned(config, *asked)
    assert free["layout"] == "everything on the device; recompute nothing"
    for flags, said in (
        (["--place.experts", "host"], "experts on host"),
        (["--place.experts", "disk", "--place.split", "4"], "experts on disk, split over 4; "),
        (["--place.split", "2"], "experts on device, split over 2; "),
        (["--place.rest", "peers"], "rest on peers; "),
        (["--place.boundary", "host"], "boundary on host; "),
        (["--place.optimizer", "host"], "optimizer on host; "),
        (["--place.adapters", "host"], "adapters on host; "),
        (
            ["--place.experts", "disk", "--place.split", "1", "--place.buffer", "0.5"],
            "experts on disk in groups of 512.0 MiB; ",
        ),
    ):
        found = planned(config, *asked, *flags, "--waiting", "1")
        assert said in found["layout"], flags
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{config}"\ndata = "chat.jsonl"\n[place]\nexperts = "disk"\nsplit = 2\n')
    found = planned(str(file), *asked, "--waiting", "1")
    assert "experts on disk, split over 2; " in found["layout"]
    found = planned(str(file), *asked, "--place.split", "4", "--waiting", "1")
    assert "experts on disk, split over 4; " in found["layout"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("8xH200 --place.experts host --train all", "place.experts is host, but every weight trains"),
        ("8xH200 --place.adapters host --train all", "place.adapters is host, but every weight trains"),
        ("cpu:256GB --place.boundary host", "place.boundary is host, but .* its memory is the host's"),
        ("cpu:256GB --place.experts host", "place.experts is host, but .* its memory is the host's"),
        ("1xH200 --place.rest peers", "place.rest is peers, but .* has no peers"),
        ("8xH200 --place.split 3", "place.split is 3, which does not divide the 8 processes"),
        ("8xH200 --place.weights sharded", "place.weights is sharded, but adapters are trained"),
        ("8xH200 --place.experts device --place.buffer 0.5", "nothing uses a buffer"),
    ],
)
def test_places_that_cannot_be_are_one_line(config, arguments, said):
    with pytest.raises(ConfigError, match=said):
        planned(config, "--hardware", *arguments.split())


def test_weights_that_are_divided_are_counted_as_divided(config):
    """Of each a device has an eighth, in float32; whole they are 2 bytes a weight on each."""
    asked = config, "--hardware", "8xH200", "--train", "all", "--place.weights"
    whole, divided = (planned(*asked, held)["bytes"]["device_terms"] for held in ("device", "sharded"))
    weights = (whole["experts"] + whole["the other weights"]) / 2
    assert divided["a part of the weights"] == pytest.approx(weights * 4 / 8, rel=1e-3)
    assert divided["optimizer"] == pytest.approx(weights * 8 / 8, rel=1e-3)
    assert not {"experts", "the other weights"} & divided.keys()


@pytest.mark.parametrize(
    ("gib", "said"), [("1e-6", "place.buffer is 1e-06|one expert of a layer takes"), ("100", "")]
)
def test_a_buffer_for_less_than_an_expert_is_one_line_and_for_more_than_a_layer_is_a_layers(
    config, gib, said
):
    """As in a run."""
    asked = config, "--hardware", "8xH200", "--waiting", "1", "--place.experts", "disk", "--place.buffer"
    if said:
        with pytest.raises(ConfigError, match=said):
            planned(*asked, gib)
    else:
        assert planned(*asked, gib)["bytes"] == planned(*asked, "0")["bytes"]


def test_a_dense_model_has_no_line_of_experts_and_no_row_of_0_bytes(config, tmp_path, capsys):
    (tmp_path / "dense.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    _, dense = said(capsys, "--model", str(tmp_path / "dense.json"), "--hardware", "8xH200")
    assert "experts" not in "\n".join(dense) and not any(line.endswith(" 0 B") for line in dense)
    found = planned("--model", str(tmp_path / "dense.json"), "--hardware", "8xH200")
    assert "experts" not in found["layout"] and all(found["bytes"]["device_terms"].values())
    refused = planned("--model", str(tmp_path / "dense.json"), "--hardware", "1xRTX4090", "--train", "all")
    assert refused["proposals"] and not any("experts" in line for line in refused["proposals"])
    _, mixture = said(capsys, "--model", config, "--hardware", "1xH200")
    assert any(line.strip().startswith("experts") for line in mixture)


def test_a_config_alone_with_a_price(config):
    found = planned("--model", config, "--hardware", "1xH100", "--usd-per-hour", "3.6")
    assert found["fits"] and found["not_built"] == []
    # 30.5 billion weights in bf16
    assert found["bytes"]["total"] == pytest.approx(61.06e9, rel=1e-3)
    assert sum(found["bytes"]["device_terms"].values()) == found["bytes"]["device"]
    assert found["usd_per_million_tokens"] == pytest.approx(3.6e6 / 3600 / found["tokens_per_second"])
    assert found["dominating"] in found["seconds"]


def test_no_price_without_the_users_own(config):
    found = planned("--model", config, "--hardware", "1xH100")
    assert found["usd_per_million_tokens"] is None


def test_a_card_too_small_says_what_fits(config):
    found = planned("--model", config, "--hardware", "1xRTX4090")
    assert not found["fits"] and found["bytes"]["device"] > found["bytes"]["device_usable"]
    assert any(line.startswith("--hardware 1xRTX4090+128GB (") for line in found["proposals"])


def test_given_tokens_are_kept(config):
    found = planned("--model", config, "--hardware", "8xH200", "--tokens-per-step", "16384")
    assert found["tokens_per_step"] == 16384


def test_tokens_that_the_plan_chose_are_said_beside_a_runs_own(config, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{config}"\ndata = "chat.jsonl"\n')
    for arguments, said in (
        (["--model", config], "tokens a step (chosen; a run takes 32,768 unless"),
        (["--model", config, "--tokens-per-step", "4096"], "  4,096 tokens a step,"),
        ([str(file)], "  32,768 tokens a step,"),  # the run's own: 4,096 for each of its processes
        ([str(file), "--tokens-per-step", "4096"], "  4,096 tokens a step,"),
    ):
        plan.main([*arguments, "--hardware", "8xH200"], Common())
        assert said in capsys.readouterr().out


def test_a_run_file_and_flags_over_it(config, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{config}"\ndata = "chat.jsonl"\ntokens_per_step = 8192\n[lora]\nrank = 4\n')
    from_file = planned(str(file), "--hardware", "1xH200")
    flags = planned(str(file), "--hardware", "1xH200", "--lora.rank", "8")
    assert from_file["tokens_per_step"] == flags["tokens_per_step"] == 8192
    assert flags["adapter_parameters"] == 2 * from_file["adapter_parameters"]
    # a flag of [lora] leaves the file's other keys of it
    file.write_text(file.read_text() + 'targets = ["attention"]\n')
    fewer = planned(str(file), "--hardware", "1xH200")
    same = planned(str(file), "--hardware", "1xH200", "--lora.rank", "4")
    assert same["adapter_parameters"] == fewer["adapter_parameters"] < from_file["adapter_parameters"]


def test_every_weight_of_packed_experts_is_refused_as_the_run_refuses_it():
    with pytest.raises(ConfigError, match="is packed: gradients"):
        planned("--model", str(TINY_K2), "--train", "all", "--hardware", "1xH200")


def test_flags_of_adapters_where_all_trains_are_refused(config):
    with pytest.raises(ConfigError, match="has no adapters"):
        planned("--model", config, "--train", "all", "--lora.rank", "8", "--hardware", "8xH200")


def test_a_quantization_beside_the_config_is_not_planned_as_bf16(config, tmp_path):
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(ConfigError, match="W4A8_AWQ"):
        planned("--model", str(tmp_path), "--hardware", "8xH200")
    with pytest.raises(ConfigError, match="W4A8_AWQ"):
        planned("--model", config, "--hardware", "8xH200")
    copy = tmp_path / "release.json"
    copy.write_bytes(Path(config).read_bytes())
    # control arm: not beside this one
    dense = planned("--model", str(copy), "--hardware", "8xH200")["bytes"]["total"]
    bytes_of = {}
    for algorithm in ("NVFP4", "FP8"):
        (tmp_path / "release.hf_quant_config.json").write_text(
            json.dumps({"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}})
        )
        bytes_of[algorithm] = planned("--model", str(copy), "--hardware", "8xH200")["bytes"]["total"]
    assert bytes_of["NVFP4"] < bytes_of["FP8"] < dense


def test_where_all_trains_experts_are_not_split(config):
    assert "split" not in planned("--model", config, "--hardware", "8xB200", "--train", "all")["layout"]


def flags_of(line, arguments):
    """The arguments of a plan with the flags of a proposal in their place: "--lora.rank 8 --waiting 0.93 (…)"."""
    found, words = list(arguments), line.split(" (")[0].split()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        assert flag.startswith("--"), line
        if flag in found:
            found[found.index(flag) + 1] = value
        else:
            found += [flag, value]
    return found


REFUSED = [
    ("LLAMA", "72xL40S"),
    ("LLAMA", "8xH100+1TB", "--tokens-per-step", "4096"),
    ("LLAMA", "1xH200+768GB", "--micro-batches", "16"),
    ("LLAMA", "cpu:24GB"),
    ("QWEN", "1xRTX4090"),
    ("QWEN", "1xRTX4090", "--lora.rank", "512", "--tokens-per-step", "65536"),
    ("QWEN", "1xRTX4090+128GB", "--place.recompute", "nothing", "--tokens-per-step", "16384"),
    ("QWEN", "1xL40S", "--train", "all"),
    ("QWEN", "cpu:8GB", "--optimizer.moments", "int8"),
]


@pytest.mark.parametrize("model, hardware, arguments", [(m, h, rest) for m, h, *rest in REFUSED])
def test_what_a_refusal_proposes_fits(tmp_path, model, hardware, arguments):
    """Each proposal, given as flags, is a plan that fits."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"LLAMA": LLAMA, "QWEN": QWEN}[model]))
    asked = ["--model", str(path), "--hardware", hardware, *arguments]
    refused = planned(*asked)
    assert not refused["fits"] and refused["proposals"]
    for line in refused["proposals"]:
        assert planned(*flags_of(line, asked))["fits"], line


def test_what_fits_but_waits_is_proposed_with_its_wait(tmp_path):
    """405 billion parameters on 72 cards without NVLink: sharded they fit, and gathering them takes the step."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = "--model", str(tmp_path), "--hardware", "72xL40S"
    (line,) = (line for line in planned(*arguments)["proposals"] if "of a step waits for transfers" in line)
    name, share = line.split(" (")[0].split()
    assert name == "--waiting" and 0.25 < float(share) < 1
    found = planned(*arguments, "--waiting", share)
    assert found["fits"] and 0.25 < found["seconds"]["shown"] / found["seconds"]["step"] <= float(share)
    assert not planned(*arguments)["fits"]  # control arm


def test_what_waits_for_a_few_tokens_is_told_how_many_are_enough(tmp_path):
    """405 billion parameters stream from host memory once a pass, whatever a step has."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["--model", str(tmp_path), "--hardware", "8xH100+1TB", "--tokens-per-step"]
    more = [line for line in planned(*arguments, "4096")["proposals"] if line.startswith("--tokens-per-step")]
    tokens = more[0].split()[1]
    assert int(tokens) > 4096 and planned(*arguments, tokens)["fits"]
    assert not planned(*arguments, str(int(tokens) // 2))["fits"]  # control arm


def test_micro_batches_are_dealt_to_the_devices(config):
    """Eight of them on eight devices: each device computes one, as the run does. Of two halves the activations
    are half, and at these many tokens that is more than the gradients, which are there beside the second's."""
    arguments = (
        "--model",
        config,
        "--hardware",
        "8xH200",
        "--tokens-per-step",
        "262144",
        "--place.recompute",
        "layers",
    )
    assert planned(*arguments, "--micro-batches", "8") == planned(*arguments)
    halves = planned(*arguments, "--micro-batches", "16")
    assert halves["bytes"]["device"] < planned(*arguments)["bytes"]["device"]


def test_a_run_on_several_devices_is_told_how_many_micro_batches_it_needs(config, capsys):
    """A run of eight processes and one micro-batch, or twelve, is refused before anything is loaded."""
    needs = "  each device needs the same number of micro-batches: a run takes --micro-batches 8 or 16"
    arguments = "--model", config, "--hardware"
    assert needs in said(capsys, *arguments, "8xH200")[1]
    assert needs in said(capsys, *arguments, "8xH200", "--micro-batches", "12")[1]
    for enough in (["8xH200", "--micro-batches", "8"], ["1xH200"]):
        assert not any("each device needs" in line for line in said(capsys, *arguments, *enough)[1])


def test_documents_are_no_longer_than_the_model_and_a_micro_batch_take(config):
    positions = json.loads(Path(config).read_text())["max_position_embeddings"]
    arguments = "--model", config, "--hardware", "1xH200", "--tokens-per-step", str(4 * positions)
    longest = planned(*arguments, "--sequence-length", str(positions))
    longer = planned(*arguments, "--sequence-length", str(100 * positions))
    assert longer["notes"] == ["documents have at most 40,960 tokens: the model takes no longer documents"]
    assert longer | {"notes": []} == longest
    shorter = planned(*arguments, "--sequence-length", str(positions // 2))
    assert shorter["tokens_per_second"] > longest["tokens_per_second"]


def test_a_device_has_a_whole_document_where_the_plan_chooses(config):
    """A run cuts documents to what a device has at once; where that is asked for, it is said."""
    arguments = "--model", config, "--hardware", "64xH200", "--sequence-length", "8192"
    chosen = planned(*arguments)
    assert chosen["tokens_per_step"] >= 64 * 8192 and chosen["notes"] == []
    given = planned(*arguments, "--tokens-per-step", "65536")
    assert given["notes"] == [
        "documents are cut to 1,024 tokens, the micro-batch of a device; to keep 8,192: --tokens-per-step 524288"
    ]
    assert planned(*arguments, "--tokens-per-step", "524288")["notes"] == []
    # what does not fit is shown at its least, and nobody asked for that
    assert planned("--model", config, "--hardware", "1xRTX4090")["notes"] == []
    # control arm: where whole ones don't fit, cut ones are planned, and said
    cut = planned("--model", config, "--hardware", "1xH100", "--sequence-length", "40960")
    assert cut["fits"] and cut["tokens_per_step"] < 40960 and "documents are cut to" in cut["notes"][0]


def test_a_config_whose_every_layer_is_dense_has_seconds(config, tmp_path):
    fields = json.loads(Path(config).read_text()) | {"mlp_only_layers": [0], "decoder_sparse_step": 10_000}
    path = tmp_path / "dense.json"
    path.write_text(json.dumps(fields))
    assert planned("--model", str(path), "--hardware", "1xH200")["tokens_per_second"] > 0


def test_names_in_brackets_are_shown_as_they_are(config, tmp_path, capsys):
    folder = tmp_path / "a[red]b"
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(config).read_bytes())
    plan.main(["--model", str(folder), "--hardware", "1xH200"], Common())
    assert "a[red]b on 1xH200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "micro_batches = 4\nrecompute = 'selective'\nkeep_layers = 1",
        "recompute = 'layers'\noptimizer_moments = 'int8'",
        "train = 'all'\nrecompute = 'elementwise'",
    ],
)
def test_a_run_on_this_machine_is_planned_as_the_run_plans_itself(words, tmp_path):
    """Every term that stays or is alive at the worst moment, to the byte."""
    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.config.parse import from_keywords
    from unfreeze.config.sft import Config
    from unfreeze.job.planning.plan import Planning
    from unfreeze.job.trained import Adapters, AllWeights

    model = tmp_path / "model"
    dense = {name: value for name, value in QWEN.items() if "exp" not in name and "moe" not in name}
    dense |= {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512}
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dense))
    built = models.build(models.shape(dense), dtype=torch.bfloat16, device="cpu")
    save_file({k: v.contiguous() for k, v in built.state_dict().items()}, model / "model.safetensors")
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model}"\ndata = "d.jsonl"\ntokens_per_step = 8192\n{words}\n')

    run = from_keywords(Config, {}, function="sft", file=str(file))
    manifest = open_checkpoint(str(model))
    trained = AllWeights() if run.lora is None else Adapters(run.lora, 0)
    shape, cpu = models.shape(manifest.config), torch.device("cpu")
    theirs = Planning(run, trained, manifest, shape, cpu).first()[1]
    ours = planned(str(file), "--hardware", "cpu:24GB")["bytes"]
    # what this process takes already is of a machine that may not be here
    assert ours["device"] == theirs.training + ours["device_terms"]["interpreter and libraries"]
    assert ours["device_terms"]["interpreter and libraries"] == PROCESS


def test_more_devices_than_tokens_is_refused(config):
    with pytest.raises(ConfigError, match="64 tokens per step are fewer than 2 for each of 1,000"):
        planned("--model", config, "--hardware", "1000xH200", "--tokens-per-step", "64")


def test_every_weight(config):
    found = planned("--model", config, "--hardware", "1xH200", "--train", "all")
    assert not found["fits"] and found["adapter_parameters"] == 0


def test_every_weight_that_does_not_fit_is_told_adapters_that_do(config):
    """Control arm: where adapters do not fit either, what they need is said with them."""
    one, four = (
        planned("--model", config, "--hardware", m, "--train", "all") for m in ("1xH200", "1xRTX4090")
    )
    assert any(line.startswith("--train adapters --lora.rank 16 (") for line in one["proposals"])
    assert any(line.startswith("--train adapters --") and "host memory" in line for line in four["proposals"])
    assert planned("--model", config, "--hardware", "1xH200")["fits"]
    assert not planned("--model", config, "--hardware", "1xRTX4090")["fits"]


def test_a_refusal_has_a_proposal_or_a_reason(config):
    for hardware in ("cpu:8GB", "cpu:1GB", "1xRTX4090", "8xH100"):
        # with its tokens named: free ones make 6 s of the search for what fits at a rank
        large = ["--lora.rank", "4096", "--tokens-per-step", "8192"]
        for arguments in (["--train", "all"], large, ["--tokens-per-step", "65536"]):
            found = planned("--model", config, "--hardware", hardware, *arguments)
            assert found["fits"] or found["proposals"] or "alone" in found["reason"], (hardware, arguments)


def test_a_model_planned_for_several_machines_is_opened_once(config, monkeypatch):
    opened = []
    monkeypatch.setattr(plan, "open_for_plan", lambda c, real=plan.open_for_plan: opened.append(c) or real(c))
    hardware = "1xH100", "8xH200", "cpu:256GB"
    both = planned("--model", config, "--hardware", *hardware)["plans"]
    assert len(opened) == 1
    # what is kept between plans is not another machine's
    assert both == [planned("--model", config, "--hardware", words) for words in hardware]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "plan needs a model"),
        (["--model", "nowhere.json"], "nowhere.json"),
        (["--model", "CONFIG", "--hardware", "8xH20O"], "no data for a device 'H20O'"),
        (["--model", "CONFIG", "--usd-per-hour", "0"], "--usd-per-hour 0: must be more than 0.0"),
    ],
)
def test_what_is_refused(config, arguments, says):
    from unfreeze.core.errors import UserError

    with pytest.raises(UserError, match=says):
        planned(*(config if word == "CONFIG" else word for word in arguments))


@pytest.fixture
def few_layers(config):
    """Two of its 48: what holds of a plan of any size."""
    Path(config).write_text(json.dumps(QWEN | {"num_hidden_layers": 2}))
    return config


def test_this_machine_needs_no_gpu_and_no_network(few_layers, forkserver):
    code = (
        "import sys, torch; torch.cuda.is_available = lambda: False; import socket; socket.socket = None;"
        "from unfreeze.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["plan", "--model", few_layers, "--train", "all", "--json", "--quiet"]
    done = forkserver.run(["-c", code, *words])
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if found["fits"] else plan.DOES_NOT_FIT), done.stderr
    assert (found["tokens_per_second"] is None) == (found["source"] is None)
    assert found["source"] is None or "measured on" in found["source"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--hardware"], "--hardware needs values"),
        (["--hardware", "8xH200", "8xh200"], "names '8xH200' twice|names '8xh200' twice"),
        (["--hardware", "8xH200", "--hardware", "1xH200"], "--hardware is given twice"),
        (["--machines", "x.toml", "--hardware", "cpu:24GB"], "machines has no effect"),
        (["--out", "x.svg"], "there is no flag --out"),
        (["--trace", "runs/x"], "there is no flag --trace; the replay of a step was removed"),
        (["--simulate"], "there is no flag --simulate; the replay of a step was removed"),
        (["--sweep"], "there is no flag --sweep; plan takes several machines at once"),
        (["--place.recompute", "layers", "--place.keep-layers", "3"], "keep_layers has no effect"),
    ],
)
def test_what_would_change_nothing_is_refused_by_name(config, arguments, says):
    with pytest.raises(ConfigError, match=says):
        planned("--model", config, *arguments)


def test_control_arm_the_same_flags_where_they_have_an_effect(config):
    planned("--model", config, "--hardware", "8xH200", "1xH200")
    kept = [
        "--model",
        config,
        "--hardware",
        "1xH200",
        "--tokens-per-step",
        "16384",
        "--place.keep-layers",
        "3",
    ]
    auto, named = planned(*kept), planned(*kept, "--place.recompute", "elementwise")
    assert auto == named and "recompute elementwise" in auto["layout"]
    assert (
        auto["bytes"]["device"] < planned(*kept[:-2], "--place.recompute", "elementwise")["bytes"]["device"]
    )


def test_the_dtype_of_a_cpu_elsewhere_is_said_to_be_that_of_the_one_here(config, capsys):
    _, elsewhere = said(capsys, "--model", config, "--hardware", "cpu:200GB")
    _, here = said(capsys, "--model", config)
    assert ["(taken to be as here: this CPU" in "".join(lines) for lines in (elsewhere, here)] == [
        True,
        False,
    ]


def test_a_gpu_that_no_table_knows_is_planned_as_a_gpu_without_seconds(few_layers, monkeypatch):
    from unfreeze.parallel import machine

    def here(place="cpu"):
        kind = torch.device(place).type
        return machine.Hardware(kind, "NVIDIA X1", 8, 200 * 2**30, 200 * 2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "hardware", here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA X1")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    card = cards.Card("NVIDIA X1", (9, 0), 200 * 2**30, "580.65", "CUDA 13.0")
    monkeypatch.setattr(cards, "here", lambda: card)
    monkeypatch.setattr(cards, "card_of", lambda device: card)
    found = planned("--model", few_layers)
    assert found["hardware"] == "NVIDIA X1" and found["tokens_per_second"] is None
    on_cpu = planned("--model", few_layers, "--hardware", "cpu:200GB")
    terms, others = found["bytes"]["device_terms"], on_cpu["bytes"]["device_terms"]
    # on a CPU experts are expanded one at a time, and the program itself takes memory
    assert terms["expert workspace"] != others["expert workspace"]
    assert "interpreter and libraries" in others and "interpreter and libraries" not in terms
