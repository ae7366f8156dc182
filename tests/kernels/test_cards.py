"""Cards by generation: which are supported, which have Triton, and why others are refused."""

from dataclasses import replace

import pytest

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
