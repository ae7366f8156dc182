"""Seconds of a step, by hand: term by term, and where transfers hide under computation."""

import math
from dataclasses import replace

import pytest
import torch

from unfreeze.core.layout import RESIDENT
from unfreeze.parallel.plan import choose, passes
from unfreeze.parallel.plan import seconds as timing
from unfreeze.parallel.plan.counts import Counts, Widths
from unfreeze.parallel.plan.fleet import Fleet, fleet
from unfreeze.parallel.plan.places import room
from unfreeze.parallel.plan.rates import Rates, of_device
from unfreeze.parallel.plan.seconds import Step, seconds
from unfreeze.parallel.plan.terms import Work

MOE = Counts(
    hidden_size=7168,
    vocab_size=163840,
    num_layers=61,
    moe_layers=60,
    num_experts=384,
    experts_per_token=8,
    expert_width=2048,
    experts_bytes=570_760_888_320,
    rest_bytes=23_444_647_936,
    layer_experts=9_512_681_472,
    layer_rest=370_000_000,
    ends_bytes=4_697_620_480,
    packed=True,
    dense=8_500_000_000,
    router=60 * 384 * 7168,
    attention=61 * 2 * 64 * 320,
    widths=Widths(
        into=2_000_000,
        out=3_000_000,
        inputs=1_500_000,
        linears=488,
        activated=140_000,
        rotated=750_000,
        normed=125_000,
    ),
)
EXPANDED = 570_760_888_320 / (60 * 384 * 3 * 7168 * 2048) + 2  # 0.5625 bytes of codes a weight, and 2 written
TRAINED = {"dense": 88_000_000, "experts": 10_192_158_720 // 8}


def of(words, layout, **changes):
    machine = fleet(words)
    assert machine.device is not None
    beside = {name: changes.pop(name) for name in ("imbalance", "second") if name in changes}
    step = Step(**{"tokens": 65536, "length": 2048, "trained": TRAINED} | changes)
    return seconds(MOE, machine, of_device(machine.device), layout, step, **beside)


def test_the_stream_of_one_h200_by_hand():
    """570.8 GB twice over a link of 50 GB/s."""
    found = of(
        "1xH200+768GB", RESIDENT.but(experts="host", adapters="host", optimizer="host", boundary="host")
    )
    assert found.terms["stream of experts"] == pytest.approx(2 * 570.76e9 / 50e9, rel=1e-3)
    assert found.dominating == "stream of experts" and 0 < found.shown < found.terms["stream of experts"]


def test_moments_in_host_memory_go_up_while_others_go_down():
    """8 bytes a parameter each way, where that is longer than the update itself."""
    time = of("1xH200+768GB", RESIDENT.but(experts="host", optimizer="host"))
    host, trained = fleet("1xH200").device.host_gb_s * 1e9, sum(TRAINED.values())
    assert time.terms["optimizer"] == pytest.approx(8 * trained / host)
    resident = of("1xH200+768GB", RESIDENT.but(experts="host"))
    assert time.step - resident.step == pytest.approx(8 * trained / host - resident.terms["optimizer"])


def test_experts_split_inside_a_host_talk_over_its_own_link():
    """16 devices in two hosts: eight share the experts, so no row leaves its host."""
    eight, sixteen = (of(f"{n}xH200", RESIDENT.but(split=8)) for n in (8, 16))
    assert sixteen.terms["all-to-all"] == pytest.approx(eight.terms["all-to-all"] / 2)


RATES = Rates(
    source="primes",
    experts=1e14,
    half_rows=100.0,
    dense=2e14,
    attention=3e14,
    routers=5e12,
    head=7e14,
    expansion=11e11,
    passes=13e11,
    norms=17e9,
    optimizer=19e9,
    launch=0.0,
)


def test_rows_have_room_for_a_quarter_more_than_the_mean():
    """Of eight processes that hold 48 of 384 experts each; of seven, the fullest holds 55 of 384."""
    assert room(MOE, 4096, 8) == int(1.25 * 4096 * 8)
    assert room(MOE, 4096, 7) == int(1.25 * 4096 * 8 * 7 * 55 / 384)
    assert room(MOE, 1, 8) == 585  # 64 MiB of rows, however few tokens


def test_windows_are_seen_instead_of_documents():
    """Half of the layers see 128 tokens of 2,048: 128 - 128² / 2 · 2048 of them on average, not 1,024."""
    half = MOE.attention // 2
    slides = replace(MOE, windows=((128, half), (None, half)))
    assert slides.pairs(2048) == pytest.approx(half * (128 - 4) + half * 1024)
    assert slides.pairs(64) == MOE.pairs(64) == pytest.approx(MOE.attention * 32)


def test_elementwise_attends_and_multiplies_as_often_as_nothing():
    """Passes between products are made again; attention's result and those of linear layers are kept, MLA's too."""
    layouts = (RESIDENT.but(recompute=name) for name in ("nothing", "elementwise", "layers"))
    nothing, elementwise, layers = (
        seconds(MOE, fleet("8xH200"), RATES, layout, Step(65536, 2048, TRAINED)).terms for layout in layouts
    )
    for term in ("attention", "dense layers", "experts"):
        assert nothing[term] == elementwise[term] < layers[term]
    assert nothing["elementwise"] < elementwise["elementwise"] == layers["elementwise"]


@pytest.mark.parametrize(
    "name, triton, experts, waits",
    [
        ("H100", True, 0.66, False),
        ("H100", False, 0.66, False),
        ("B200", True, 0.66, False),
        ("A100", True, 0.6, False),
        ("RTX4090", True, 0.6, False),
        ("RTX5090", True, 0.6, False),
        ("RTX4090", False, 0.66, True),
    ],
)
def test_a_card_without_the_fast_grouped_product_runs_ours_or_a_loop_that_waits(name, triton, experts, waits):
    machine = fleet(f"1x{name}")
    rates = of_device(machine.device, triton=triton)
    assert rates.experts == pytest.approx(experts * machine.device.matrix * 1e12)
    found = seconds(MOE, machine, rates, RESIDENT.but(recompute="layers"), Step(4096, 2048, TRAINED))
    # 16 products a layer: two of the base and their thin ones, forward twice and backward
    by_hand = 60 * 16 * (384 * rates.launch + 50e-6)
    assert found.terms.get("waits of grouped products", 0.0) == pytest.approx(by_hand if waits else 0.0)
    without = seconds(
        MOE, machine, replace(rates, loop=0.0), RESIDENT.but(recompute="layers"), Step(4096, 2048, TRAINED)
    )
    assert found.step - without.step == pytest.approx(by_hand if waits else 0.0)


@pytest.mark.parametrize(
    "here, installed, loops", [(True, False, True), (True, True, False), (False, False, False)]
)
def test_only_this_machine_can_lack_triton(here, installed, loops, monkeypatch):
    monkeypatch.setattr(choose, "installed", lambda: installed)
    machine = replace(fleet("1xRTX4090"), here=here)
    rates = choose.rates_of(machine, choose.PlanRequest(Work(4096), None, 2048))
    assert (rates.loop > 0) is loops


def test_the_host_queues_what_the_device_computes_and_updates_after_it():
    """A small step is the host's: 6 µs a launch. A large one hides them, but for the update's Python."""
    machine, dense = fleet("8xH200"), replace(MOE, moe_layers=0, num_experts=0, packed=False)
    small, large = (
        seconds(dense, machine, of_device(machine.device), RESIDENT, Step(tokens, 2048, TRAINED))
        for tokens in (128, 2**20)
    )
    assert "launches" not in large.terms and small.terms["launches"] > 0
    of_tensors = 4 * 2 * MOE.widths.linears * 6e-6
    assert small.terms["host"] == large.terms["host"] == pytest.approx(of_tensors)
    queued = small.terms["launches"] + sum(
        small.terms[name]
        for name in small.terms
        if name not in ("launches", "host", "head", "optimizer", "all-to-all", "sum of gradients")
    )
    assert queued == pytest.approx(passes.launches(dense, 2, 2, 1) * 6e-6)


def test_every_term_by_hand():
    """16 devices in two hosts of eight that share the experts, two micro-batches, all recomputed.

    A device has t = 65,536 / 16 / 2 tokens at a time, fewer than a document asks for.
    """
    t, rows = 2048, 2048 * 8 * 1.1
    layout = RESIDENT.but(split=8, rest="peers", recompute="layers")
    found = seconds(MOE, fleet("16xH200"), RATES, layout, Step(65536, 100_000, TRAINED, micro_batches=2))
    expert, adapter = 3 * 7168 * 2048, TRAINED["experts"] / 60 / 48
    m = rows / 48
    layers = {
        # forward twice, the input's gradient; of adapters two factors' gradients
        "experts": 60 * rows * 2 * (expert * 3 + adapter * 4) / (1e14 * m / (m + 100)),
        "expansion": 60
        * 48
        * expert
        * EXPANDED
        * 2
        / 11e11,  # codes are remembered between forward and backward
        # those of one process; adapters of packed experts; what eight processes send each other
        "passes over rows": 60
        * rows
        * 2
        * (14 * 7168 + 16 * 2048 + (2 + 3) * 7168 + (2 + 5) * 2048 + 8 * 7168)
        / 13e11,
        "dense layers": t * 2 * (8.5e9 * 3 + 88e6 * 4) / 2e14,
        "norms": t * 61 * 2 * 7168 * 1.5 / 17e9,
        "elementwise": t
        * 2
        * (
            2 * (6 * 7168 * 61 + 3 * 7168 * 60 + 3 * 140_000 + 2 * 750_000 + 2 * 125_000)
            + 6 * 7168 * 121
            + 5 * 140_000
            + 2 * 750_000
            + 3 * 125_000
            + 3 * (2_000_000 - 1_500_000)
        )
        / 13e11,
        "adapters' traffic": t * 2 * (2 * (2e6 + 2 * 3e6) + 3 * 2e6 + 2 * 3e6) / 13e11,
        "attention": t * t / 2 * MOE.attention * 4.5 / 3e14,
        "routers": t * 2 * MOE.router * 3 / 5e12,
    }
    exchange = 60 * 5 * rows * 7 / 8 * 2 * 7168 / (0.75 * 450e9)
    # a host's eight ports bring what all its devices get: 400 GB/s, less than the 450 between its devices
    gather = 2 * MOE.rest_bytes * 15 / 16 / 400e9
    head = t * 2 * 7168 * 163840 * 2 / 7e14
    optimizer = sum(TRAINED.values()) / 19e9
    # dense adapters are on all sixteen; experts' on two, each pair with a port of its own
    sums = 2 * 4 * (88e6 * 15 / 16 / 400e9 + TRAINED["experts"] / 2 / 50e9)
    want = {name: 2 * each for name, each in layers.items()} | {
        "all-to-all": 2 * exchange,
        "gather of the rest": 2 * gather,
        "head": 2 * head,
        "optimizer": optimizer,
        "sum of gradients": sums,
    }
    assert found.terms == pytest.approx(want)
    compute = sum(layers.values()) + exchange
    shown = sum(max(0.0, gather / 2 - compute * share) for share in (1 / 4, 3 / 4))
    assert found.shown == pytest.approx(2 * shown)
    assert found.step == pytest.approx(2 * (compute + shown + head) + optimizer + sums)


def test_the_ports_of_a_host_bring_what_its_devices_share():
    """12 devices: the second host has four ports. Eight are one host, without any."""
    shared = RESIDENT.but(rest="peers")
    gather = {n: of(f"{n}xH200", shared).terms["gather of the rest"] for n in (8, 12, 16)}
    assert gather[8] == pytest.approx(2 * MOE.rest_bytes * 7 / 8 / 450e9)
    assert gather[12] == pytest.approx(2 * MOE.rest_bytes * 11 / 12 / 200e9)
    assert gather[16] == pytest.approx(2 * MOE.rest_bytes * 15 / 16 / 400e9)


def test_experts_that_do_not_divide_evenly_make_the_fullest_device_slower():
    """384 experts on 512 devices: 384 have one and 128 none, so these wait for 4/3 of the mean. On 128: three each."""
    trained = TRAINED | {"experts": 10_192_158_720 // 384}
    few, many = (of(f"{n}xH200", RESIDENT.but(split=n), trained=trained, tokens=2**20) for n in (128, 512))
    rows = 2**20 / 512 * 8 * 1.1
    rates = of_device(fleet("1xH200").device)
    flops = 60 * rows * 4 / 3 * 2 * (3 * 7168 * 2048 * 3 + trained["experts"] / 60 * 4)
    assert many.terms["experts"] == pytest.approx(flops / rates.of_experts(rows / 0.75))
    # what every device computes alike is a quarter; experts are a third
    assert many.terms["routers"] == pytest.approx(few.terms["routers"] / 4)
    assert many.terms["passes over rows"] == pytest.approx(few.terms["passes over rows"] / 3)


def test_experts_that_come_in_groups_are_expanded_at_each_visit():
    """All 384 on one device are more than its workspace: forward twice and backward, instead of twice in all."""
    one, eight = (
        seconds(
            MOE,
            fleet("8xH200"),
            RATES,
            RESIDENT.but(split=split, recompute="layers"),
            Step(65536, 2048, TRAINED),
        )
        for split in (1, 8)
    )
    assert one.terms["expansion"] == pytest.approx(8 * eight.terms["expansion"] * 3 / 2)


@pytest.mark.parametrize("groups, visits", [(1, 2), (2, 3)])
def test_the_op_says_how_many_groups_there_are(groups, visits, monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "expert_groups", lambda *sizes: asked.append(sizes) or groups)
    found = seconds(MOE, fleet("8xH200"), RATES, RESIDENT.but(split=7), Step(65536, 2048, TRAINED))
    assert asked == [(55, 7168, 2048, torch.bfloat16, "cuda", 2)]
    by_hand = 60 * 55 * 3 * 7168 * 2048 * EXPANDED * visits / RATES.expansion
    assert found.terms["expansion"] == pytest.approx(by_hand)


def test_micro_batches_stream_the_experts_again_and_update_once():
    one, four = (of("1xH200+768GB", RESIDENT.but(experts="host"), micro_batches=parts) for parts in (1, 4))
    assert four.terms["stream of experts"] == pytest.approx(4 * one.terms["stream of experts"])
    assert four.terms["optimizer"] == one.terms["optimizer"] and four.terms["experts"] > one.terms["experts"]
    assert four.shown > 3 * one.shown and four.step > one.step


def test_the_rest_and_the_experts_share_the_link_to_the_host():
    time = of("1xH200+768GB", RESIDENT.but(experts="host", rest="host"), imbalance=1.0)
    both = time.terms["stream of experts"] + time.terms["stream of the rest"]
    assert time.step >= both


def test_the_experts_of_eight_h200_by_hand():
    """Rows per expert: 65,536 / 8 devices x 8 experts a token x 1.1 uneven / 48 experts here."""
    found = of("8xH200", RESIDENT.but(split=8, rest="peers"))
    rows = 8192 * 8 * 1.1
    m = rows / 48
    rate = 0.66 * 989e12 * m / (m + 128)
    adapter = 16 * 3 * (7168 + 2048)  # A and B of gate, up and down; their forward twice, both gradients
    flop = rows * (6 * 7168 * 2048 * 3 + 2 * adapter * 4)
    assert found.terms["experts"] == pytest.approx(60 * flop / rate, rel=1e-6)


def test_sixteen_devices_compute_half_as_long_but_talk_over_the_network():
    eight, sixteen = (
        of(f"{n}xH200", RESIDENT.but(split=n), trained=TRAINED | {"experts": TRAINED["experts"] * 8 // n})
        for n in (8, 16)
    )
    assert sixteen.terms["experts"] == pytest.approx(eight.terms["experts"] / 2)
    # half the rows, 15/16 of them away instead of 7/8, over 50 GB/s instead of 450
    assert sixteen.terms["all-to-all"] / eight.terms["all-to-all"] == pytest.approx(15 / 14 / 2 * 450 / 50)


@pytest.mark.parametrize("words, layout", [("8xH200", RESIDENT.but(split=8)), ("1xH200", RESIDENT)])
def test_without_streams_a_step_is_the_sum_of_its_terms(words, layout):
    time = of(words, layout, imbalance=1.0)
    assert time.step == pytest.approx(sum(time.terms.values()), rel=1e-9) and time.shown == 0


def test_sharded_weights_are_gathered_twice_and_their_gradients_summed_once():
    """Every device updates its part alone; all weights come for forward and for backward, over 450 GB/s."""
    trained = {"dense": 88_000_000}
    sharded, whole = (
        of("8xH200", RESIDENT.but(weights=held), trained=trained, every_weight=True)
        for held in ("sharded", "device")
    )
    bytes_of_all = MOE.rest_bytes + MOE.experts_bytes
    assert sharded.terms["gather of the weights"] == pytest.approx(2 * bytes_of_all * 7 / 8 / 450e9)
    for name, share in (("sum of gradients", 2), ("optimizer", 8)):
        assert whole.terms[name] == pytest.approx(share * sharded.terms[name])


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 64])
def test_a_ring_all_reduce_of_gradients_is_the_textbooks(nodes):
    """2 · bytes · (n - 1) / n over the slowest link; every device holds the dense adapters.

    Between hosts that is all eight ports of one: as many rings, each through a port of its own.
    """
    words = f"{8 * nodes}xH200"
    time = of(words, RESIDENT.but(split=8), trained={"dense": 88_000_000, "experts": 0}, imbalance=1.0)
    link = 450e9 if nodes == 1 else 8 * 50e9
    n = 8 * nodes
    by_hand = 2 * 4 * 88_000_000 * (n - 1) / n / link
    assert time.terms["sum of gradients"] == pytest.approx(by_hand, rel=0.01)
    without = sum(seconds for name, seconds in time.terms.items() if name != "sum of gradients")
    assert time.step - without == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 48])
def test_an_all_to_all_sends_what_is_not_at_home_five_times(nodes):
    """5 · rows · (n - 1) / n · 2 D a layer: inside a host over its own link, else over the network."""
    n = 8 * nodes
    time = of(f"{n}xH200", RESIDENT.but(split=n), imbalance=1.0)
    link = 450e9 if nodes == 1 else 50e9
    by_hand = 60 * 5 * (65536 / n * 8) * (n - 1) / n * 2 * 7168 / (0.75 * link)
    assert time.terms["all-to-all"] == pytest.approx(by_hand, rel=0.01)
    without = sum(seconds for name, seconds in time.terms.items() if name != "all-to-all")
    assert time.step - without == pytest.approx(by_hand, rel=0.01)


CPU = Rates("here", 7e10, 55.0, 8e10, 3e10, 8e10, 5e10, math.inf, math.inf, 4e6, 1e9, 5e-6)


@pytest.mark.parametrize("recompute", ["layers", "selective", "elementwise", "nothing"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_of_processes_of_this_cpu_is_the_sum_of_its_terms(recompute, processes):
    """The seconds that docs/measured/plan_checked.md compares with measured steps. Norms are slow here, so that every term
    shows."""
    here, given = Fleet("here", processes, 2**36, kind="cpu"), {"tokens": 4096, "length": 512}
    time = seconds(MOE, here, CPU, RESIDENT.but(recompute=recompute), Step(trained=TRAINED, **given))
    assert all(second > 1e-6 * time.step for second in time.terms.values())
    assert time.step == pytest.approx(sum(time.terms.values()), rel=1e-9)
