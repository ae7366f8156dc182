"""Cards by generation: which are supported, which have Triton, and why others are refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from unfreeze.kernels import cards
from unfreeze.kernels.cards import Card

H100 = Card(
    "NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, "580.65", "CUDA 13.0", ("sm_75", "sm_80", "sm_90", "sm_100")
)


def test_cards_of_today_run_everything():
    for name, capability in (("A100", (8, 0)), ("RTX 4090", (8, 9)), ("H100", (9, 0)), ("RTX 5090", (12, 0))):
        card = replace(H100, name=name, capability=capability, built=("sm_80", "sm_90", "sm_120"))
        assert not cards.refuses(card) and not cards.triton_refuses(card)


def test_a_t4_runs_without_triton():
    t4 = replace(H100, name="Tesla T4", capability=(7, 5))
    assert not cards.refuses(t4)
    assert cards.triton_refuses(t4) == "compute capability 7.5; Triton needs 8.0"


def test_older_cards_are_refused_with_the_number():
    assert cards.refuses(replace(H100, name="Tesla V100", capability=(7, 0))) == (
        "Tesla V100 has compute capability 7.0; it needs 7.5 or later"
    )


@pytest.mark.parametrize(
    ("built", "runs"),
    [
        (("sm_80", "sm_90"), True),  # 8.9 runs code of 8.0
        (("sm_90", "sm_100"), False),
        (("sm_50", "compute_80"), True),  # the driver compiles it further
        (("compute_90",), False),
        (("sm_90a",), False),
        ((), True),  # unknown
    ],
)
def test_a_torch_that_was_built_for_other_cards_is_named(built, runs):
    card = replace(H100, name="L40S", capability=(8, 9), built=built)
    assert (cards.refuses(card) == "") == runs
    if not runs:
        assert "no kernels for L40S (sm_89)" in cards.refuses(card)


def test_rocm_is_left_to_the_check():
    card = replace(H100, name="AMD Instinct MI300X", capability=(9, 4), runtime="ROCm 6.4", built=("gfx942",))
    assert not cards.refuses(card) and not cards.triton_refuses(card)
    assert card.words() == "AMD Instinct MI300X, ROCm 6.4, driver 580.65"


def test_the_driver_is_read_where_the_kernel_says_it(tmp_path):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert cards.driver_version(file) == "550.54.15"
    assert cards.driver_version(tmp_path / "none") == ""


def test_a_card_is_what_torch_and_the_driver_say(monkeypatch):
    """By these facts its checks are kept: with another driver they are made again."""
    said = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cards, "driver_version", lambda: "580.65")
    card = cards.card_of(torch.device("cuda", 0))
    assert card == cards.Card("NVIDIA H200", (9, 0), 141 << 30, "580.65", "CUDA 13.0", ("sm_90",))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A file system with what a kernel shows of a GPU; torch sees none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def made(*files, cuda=None, hip=None):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return made


def pci(root, vendor, kind):
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n"), (device / "class").write_text(f"{kind}\n")


def test_without_a_gpu_nothing_is_said(machine):
    root = machine()
    pci(root, "0x8086", "0x030000")  # Intel's own graphics
    assert cards.unused(root) is None


def test_a_torch_without_cuda_is_said_with_the_command_that_mends_it(machine):
    for node, maker in (("dev/nvidiactl", "NVIDIA"), ("dev/dxg", "Windows")):
        unused = cards.unused(machine(node))
        version = torch.__version__
        assert unused.why == f"torch {version} is built without CUDA, so the {maker} GPU is not used"
        assert unused.remedy == f"pip install --force-reinstall torch=={version.partition('+')[0]}"


def test_a_torch_without_rocm_is_said_on_amd(machine):
    assert "without ROCm" in cards.unused(machine("dev/kfd")).why


def test_a_gpu_of_the_host_that_a_container_does_not_see_is_no_warning_of_a_run(machine):
    root = machine(cuda="13.0")
    pci(root, "0x10de", "0x030200")
    assert cards.unused(root, nodes_only=True) is None
    assert cards.unused(root) == (
        "the NVIDIA GPU of the host is not visible here",
        "start the container with --gpus all",
    )


@pytest.mark.parametrize(
    ("words", "node", "why", "remedy"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
            "dev/nvidiactl",
            "the driver is too old for torch's CUDA 13.0: The NVIDIA driver on your system is too old"
            " (found version 11040)",
            "update it",
        ),
        (
            "Found no NVIDIA driver on your system. Please check",
            "dev/dxg",
            "Found no NVIDIA driver",
            "in Windows, not in WSL",
        ),
        ("CUDA unknown error - this may be due to", "dev/nvidiactl", "CUDA unknown error", "nvidia-smi"),
    ],
)
def test_cuda_s_own_reason_is_said_in_one_line(machine, monkeypatch, words, node, why, remedy):
    def init():
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "init", init)
    unused = cards.unused(machine(node, cuda="13.0"))
    assert unused.why.startswith(why) and remedy in unused.remedy and "\n" not in unused.why


def test_a_variable_that_hides_the_gpus_is_named(machine, monkeypatch):
    root = machine("dev/nvidiactl", cuda="13.0")
    for hidden in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert cards.unused(root) == (
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides the NVIDIA GPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for seen in ("0", "1", "1,11"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert cards.unused(root).why == "torch sees no CUDA device"
