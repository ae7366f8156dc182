"""recompute = "auto": the first choice that fits, for a model and machines in numbers."""

from unfreeze.core.layout import RESIDENT
from unfreeze.core.process import COMPILED
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Sizes, Work, plan
from unfreeze.parallel.plan.fastest import FASTEST_FIRST, SAME_BITS, fastest
from unfreeze.parallel.plan.terms import USABLE

SIZES = Sizes(
    base=2**30,
    expanded=2**30,
    compute_bytes=2,
    hidden_size=1024,
    stream_size=1024,
    num_layers=16,
    vocab_size=32000,
    layer=40000,
    held=(28000,) * 16,
    own=12000,
    kept=(4000,) * 16,
    products=(8000,) * 16,
    dense_per_rank=10**6,
)


def machine(usable, kind="cpu"):
    return Hardware(kind, "small", 2, 2**40, round(usable / USABLE) + 2)


def test_the_first_that_fits_is_taken_and_said():
    work = Work(tokens=8192, rank=16)
    totals = {
        name: plan(SIZES, RESIDENT.but(recompute=name), work, machine(2**30)).total for name in FASTEST_FIRST
    }
    assert set(FASTEST_FIRST) == set(RECOMPUTE) and set(SAME_BITS) < set(FASTEST_FIRST)
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    for name, total in totals.items():
        for kind, beside in (("cpu", COMPILED), ("cuda", 0)):
            made = fastest(plan(SIZES, RESIDENT, work, machine(total + beside, kind)))
            assert (made.layout.recompute, made.total) == (name, total)
            assert made.why.startswith("the fastest that fits")
    # a byte less: the next, and the reason names what would not fit
    less = fastest(plan(SIZES, RESIDENT, work, machine(totals["nothing"] - 2**20, "cuda")))
    assert less.layout.recompute == "elementwise" and "; nothing would take" in less.why
    # the memory of one machine for two processes
    whole = machine(2 * (totals["elementwise"] + COMPILED))
    assert fastest(plan(SIZES, RESIDENT, work, whole)).layout.recompute == "nothing"
    half = fastest(plan(SIZES, RESIDENT, work, whole.shared(2)))
    assert half.layout.recompute == "elementwise" and half.hardware.name.endswith(", shared by 2 processes")


def test_where_nothing_fits_it_is_what_takes_the_least():
    made = fastest(plan(SIZES, RESIDENT, Work(tokens=8192, rank=16), machine(2**20)))
    assert made.layout.recompute == "layers" and not made.fits and made.why.startswith("it takes the least")
