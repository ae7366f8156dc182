"""The events of a run, typed: a TypedDict per kind, its fields with unit and meaning.

An event is its line of events.jsonl, a plain dict. A field that has nothing to say is absent; null is a value
that was not finite or not measured. core/conform.py checks one where it is emitted and where it is read.
benchmarks/events_page.py makes the tables of docs/reference/events.md from this file.
"""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Required, get_args, get_type_hints

from pydantic import Field, InstanceOf, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

AnyText = InstanceOf[str]  # any str: pydantic's own refuses half of a surrogate pair, which a model may write
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
LARGEST = 1e300  # nothing measured comes near; a damaged file may say 1.7e308, and twice that is infinite


def _real(value: object) -> float:
    """A number of JSON. pydantic's own float takes a tensor of one number, which JSON cannot hold."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    if not abs(value) <= LARGEST:  # false for NaN
        raise PydanticCustomError("finite_number", "Input should be a finite number, at most 1e300")
    return value


Real = Annotated[float, PlainValidator(_real)]
Counts = Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1)]
When = Literal["before", "during", "after"]
PromptSource = Literal["your prompts", "training data", "held-out data"]


def of(unit: str, meaning: str = "") -> Any:
    """Unit and meaning of a field."""
    return Field(title=unit, description=meaning)


class CommonFields(TypedDict):
    """What every event holds."""

    step: Annotated[Int, of("finished optimizer steps", "finished when it was written; 0 before the first")]
    time: Annotated[Real, of("seconds since 1970-01-01 UTC", "when it was written")]
    warning: NotRequired[Annotated[AnyText, of("sentence", "what happened otherwise than asked")]]


class NotedRow(TypedDict):
    """A row of the data, and what was noted about it."""

    row: Annotated[Int, of("number", "which row of its file, from 1")]
    reason: Annotated[AnyText, of("sentence")]
    file: NotRequired[Annotated[AnyText, of("name", "its file, where there are several")]]


class DataEvent(CommonFields, total=False):
    """The account of the data: every row is used, cut, dropped or bad.

    Once each time the run is started, before the first step. Where rows are encoded beside training, it is of
    those that are there then, and stands again for all.
    """

    kind: Required[Literal["data"]]
    summary: Required[Annotated[AnyText, of("sentence", "the account in one line")]]
    rows: Required[Annotated[Int, of("rows", "rows of the data files")]]
    examples: Required[Annotated[Int, of("documents", "documents made of them")]]
    tokens: Required[Annotated[Int, of("tokens", "of all documents")]]
    supervised: Required[Annotated[Int, of("tokens", "tokens that carry loss, after the shift")]]
    supervised_fraction: Required[Annotated[Real, of("share, 0 to 1", "supervised / tokens")]]
    longest: Required[Annotated[Int, of("tokens", "longest document")]]
    truncated: Required[Annotated[Int, of("rows", "rows that lost tokens")]]
    dropped: Required[Annotated[Int, of("rows", "rows of which nothing could be learned, left out")]]
    bad: Required[Annotated[Int, of("rows", 'unreadable, skipped with data.on_bad_row = "skip"')]]
    shapes: Required[Annotated[dict[AnyText, Int], of("rows", "shape of row -> rows")]]
    notes: Required[Annotated[dict[AnyText, Int], of("rows", "what was noticed -> rows")]]
    listed: Required[Annotated[list[NotedRow], of("rows", "the first dropped and bad ones")]]
    split_rows: Annotated[Int, of("rows", "that became several examples: one per turn, or pieces of a text")]
    examples_dropped: Annotated[Int, of("documents", "of such rows, without a supervised token: left out")]
    tokens_cut: Annotated[Int, of("tokens", "lost by truncation")]
    cuts: Annotated[list[NotedRow], of("rows", "the first truncated ones")]
    duplicates: Annotated[Int, of("rows", "rows whose content stood before")]
    repeats: Annotated[list[NotedRow], of("rows", "the first of them")]
    held_out: Annotated[Int, of("documents", "set aside for validation")]
    packing: Annotated[AnyText, of("name", "how documents are packed")]
    efficiency: Annotated[Real | None, of("share, 0 to 1", "of the token budget that packing fills")]
    reading: Annotated[AnyText, of("name", '"memory", "disk" or "on demand"')]
    files: Annotated[dict[AnyText, Int], of("rows", "file -> rows")]
    mixture: Annotated[list[AnyText], of("sentence", "what data.weights made of each file")]
    rows_in_files: Annotated[Int, of("rows", "in the data files, where not all are encoded yet")]


class Device(TypedDict, total=False):
    """The device that the plan is made for."""

    kind: Annotated[AnyText, of("name", "cpu or cuda")]
    name: Annotated[AnyText, of("name", "the processor's or the GPU's")]
    cores: Annotated[Int, of("cores", "of the host")]
    total: Annotated[Int, of("bytes", "of memory")]
    available: Annotated[Int, of("bytes", "what a process could still take")]
    limit: Annotated[AnyText, of("name", "what bounds it")]
    process: Annotated[Int, of("bytes", "held by this process already; `available` does not include it")]
    host: Annotated[Int, of("bytes", "of a GPU's host: what a process could still take of its memory")]


class PlanEvent(CommonFields):
    """The memory plan, before any weight is read."""

    kind: Literal["plan"]
    terms: Annotated[dict[AnyText, Int], of("bytes", "what the peak is made of")]
    beside: Annotated[dict[AnyText, Int], of("bytes", "needed at other moments than the peak")]
    total: Annotated[Int, of("bytes", "the peak")]
    load: Annotated[Int, of("bytes", "the peak while loading")]
    usable: Annotated[Int, of("bytes", "what the machine can give now")]
    per_device: Annotated[list[Int], of("bytes", "an entry per device")]
    max_over_min: Annotated[Real, of("ratio", "largest over smallest of per_device")]
    expanded_avoided: Annotated[Int, of("bytes", "what expanding packed weights would add")]
    adapter_parameters: Annotated[Int, of("parameters", "trained ones")]
    seconds_per_pass: Annotated[
        Real | None, of("seconds", "predicted, of a micro-batch and an update; null without rates")
    ]
    rates: NotRequired[Annotated[AnyText, of("words", "where the rates of that are from")]]
    fits: Annotated[bool, of("yes or no", "total and load within usable")]
    hardware: Annotated[Device, of("object", "the device it is made for")]
    lines: Annotated[list[AnyText], of("sentences", "the whole plan for people (`--plan`)")]
    recompute: NotRequired[Annotated[AnyText, of("name", "what is computed again in backward")]]
    experts: NotRequired[
        Annotated[AnyText, of("name", "where the routed experts' weights lie: device, host or disk")]
    ]
    buffer: NotRequired[
        Annotated[
            Int, of("bytes", "that one of the two buffers may have, where a layer's experts come in groups")
        ]
    ]
    groups: NotRequired[Annotated[Int, of("groups", "in which the experts of a layer come, of most layers")]]
    split: NotRequired[Annotated[Int, of("processes", "that share one set of experts, if more than one do")]]
    experts_held: NotRequired[Annotated[Int, of("experts", "of a layer, by the process that holds most")]]
    weights: NotRequired[
        Annotated[AnyText, of("name", "sharded where every weight is divided among the processes")]
    ]
    rest: NotRequired[
        Annotated[AnyText, of("name", "peers where each process keeps a part of the other frozen weights")]
    ]
    boundary: NotRequired[
        Annotated[AnyText, of("name", "host where the inputs of layers lie in host memory until backward")]
    ]
    optimizer: NotRequired[
        Annotated[AnyText, of("name", "host where the adapters' moments lie in host memory between updates")]
    ]
    host: NotRequired[
        Annotated[
            Int,
            of("bytes", "of experts, inputs of layers and moments in host memory, where the device is a GPU"),
        ]
    ]
    save_bytes: NotRequired[Annotated[Int, of("bytes", "of a save of the training state, on disk")]]
    start: NotRequired[Annotated[list[AnyText], of("sentences", "what a terminal says of it")]]
    export_note: NotRequired[Annotated[AnyText, of("sentence", "what vLLM would not apply of the adapters")]]
    predicted_kernels: NotRequired[
        Annotated[list[AnyText], of("ops", "whose kernel runs unmeasured where the model has the op")]
    ]


class TimingEvent(CommonFields):
    """At the first start on a CPU: the candidates of its kernels were compiled and timed."""

    kind: Literal["timing"]
    cells: Annotated[Int, of("kinds of inputs", "whose candidates were timed")]
    seconds: Annotated[Real, of("seconds", "compiling, comparing and timing")]


class LoadEvent(CommonFields):
    """After the weights are read."""

    kind: Literal["load"]
    bytes: Annotated[Int, of("bytes", "read from the checkpoint")]
    seconds: Annotated[Real, of("seconds")]
    expanded_bytes: Annotated[Int, of("bytes", "the same weights with packed ones expanded to bf16")]
    rounded: Annotated[Int, of("tensors", "that lost precision in the dtype of the computation")]
    bytes_by_rank: NotRequired[Annotated[list[Int], of("bytes", "read by each of several processes")]]
    compiles: NotRequired[Annotated[bool, of("yes or no", "no run has made a step here in this dtype")]]


class Metric(TypedDict):
    """How the loss, or a metric of the objective, is named and shown (core/metrics.py)."""

    field: Annotated[AnyText, of("name", "its field of the train events")]
    label: Annotated[AnyText, of("words", "what it is called")]
    unit: Annotated[AnyText, of("unit", "what it is counted in")]
    over: Annotated[AnyText, of("name", "what it is a mean of: tokens, rows or steps")]
    mean: NotRequired[
        Annotated[bool, of("yes or no", "training does not change it: its mean over the run is said")]
    ]
    live: NotRequired[Annotated[bool, of("yes or no", "the live line has it")]]


class StartEvent(CommonFields):
    """Where the loop begins; once each time the run is started."""

    kind: Literal["start"]
    steps: Annotated[Int, of("optimizer steps", "of the whole run")]
    resumed: Annotated[bool, of("yes or no", "goes on from a save")]
    model: Annotated[AnyText, of("folder or id", "as configured")]
    data: Annotated[AnyText, of("file", "as configured")]
    processes: NotRequired[Annotated[Int, of("processes", "that train together, where there are several")]]
    begun: NotRequired[
        Annotated[Real, of("seconds since 1970-01-01 UTC", "when the command began; its first run tells it")]
    ]
    metrics: NotRequired[
        Annotated[list[Metric], of("object", "the loss and the metrics of the objective, as they are shown")]
    ]


class KernelChoice(TypedDict):
    """Which implementation of an op runs for inputs of a kind, and what decided.

    `origin` is one of "timed here", "measured here", "measured on its class", "predicted, not measured", "not
    measured" (the reference runs), "by design", "as asked".
    """

    op: Annotated[AnyText, of("name", "as `unfreeze kernels list` has it")]
    bucket: Annotated[AnyText, of("words", "the kind of inputs")]
    dtype: Annotated[AnyText, of("name", "of the inputs")]
    runs: Annotated[AnyText, of("name", "of the implementation")]
    origin: Annotated[AnyText, of("words", "what decided")]
    why: Annotated[AnyText, of("words", "the reason with its number")]


class KernelsEvent(CommonFields):
    """Kernels that ran for the first time in this session.

    After the first step, and after a later one that met inputs of another kind.
    """

    kind: Literal["kernels"]
    choices: Annotated[list[KernelChoice], of("object", "in the order in which they were made")]


class ExpertBalance(TypedDict):
    """How even a mixture-of-experts layer was in a step; null without a token.

    From the tokens n_e given to its E experts, mean m. Formulas: `src/unfreeze/core/balance.py`.
    """

    max_violation: Annotated[
        Real | None, of("busiest expert over the mean, minus 1", "MaxVio: 0 is even, E / top_k - 1 the worst")
    ]
    entropy: Annotated[Real | None, of("share of ln(experts), 0 to 1", "-sum p ln p / ln E, p = n / sum(n)")]
    dead: Annotated[Int, of("experts", "that were given no token")]


class TrainEvent(CommonFields, total=False):
    """After each optimizer step.

    Further fields are metrics of the objective (`correct`: share of supervised tokens whose greatest logit is
    the target), float or null. A step that was refused for a value that is not finite has `loss` null and
    `error`.
    """

    kind: Required[Literal["train"]]
    loss: Required[
        Annotated[Real | None, of("nats per supervised token", "of all micro-batches and processes")]
    ]
    grad_norm: Required[Annotated[Real | None, of("L2 norm before clipping", "of all trained parameters")]]
    epoch: Annotated[Real, of("passes over the data", "finished with this step, as the cursor counts them")]
    tokens: Annotated[Int, of("tokens", "of the step")]
    supervised_tokens: Annotated[Int, of("tokens", "of the step, weight > 0")]
    seconds: Annotated[Real, of("seconds", "of the step, without hooks and saving")]
    learning_rate: Annotated[Real, of("per step", "read back from the optimizer")]
    peak_bytes: Annotated[Int, of("bytes", "of the fullest process; CUDA: allocated by torch; CPU: resident")]
    fragmentation_bytes: Annotated[Int, of("bytes", "CUDA: reserved minus allocated")]
    applied: Annotated[bool, of("yes or no", "false where the spike guard skipped the update")]
    expert_load: Annotated[dict[AnyText, Counts], of("tokens per expert", "layer -> tokens given to each")]
    expert_balance: Annotated[dict[AnyText, ExpertBalance], of("object", "layer -> how even it was")]
    error: Annotated[AnyText, of("sentence", "what was not finite; the weights were not updated")]


class StreamEvent(CommonFields):
    """After each step of a run whose weights do not all lie on the device: what came of them since the last.

    Held-out passes between two steps count with the later one. The hidden share is 1 - waited / seconds.
    """

    kind: Literal["stream"]
    source: Annotated[AnyText, of("name", "host or disk, where experts lie; peers: of the other weights")]
    reads: Annotated[Int, of("layers", "that came")]
    bytes: Annotated[Int, of("bytes", "of them")]
    seconds: Annotated[Real, of("seconds", "that the transfers took")]
    waited: Annotated[Real, of("seconds", "of them in which nothing was computed")]
    hidden: Annotated[Real | None, of("share, 0 to 1", "of the transfers, under computation; null: none")]


class Change(TypedDict):
    """How a measure of held-out rows changed since an earlier validation, paired by row.

    Formulas: `src/unfreeze/evaluate/by_row.py`.
    """

    measure: Annotated[AnyText, of("field", "of this event")]
    since: Annotated[Int, of("finished optimizer steps", "at the earlier one: 0, or the lowest loss")]
    change: Annotated[Real, of("as the measure", "now minus then")]
    error: Annotated[Real | None, of("as the measure", "standard error of the change; null: of one row")]


class EvalEvent(CommonFields, total=False):
    """Held-out loss, or the score of a probe.

    Further fields are scores (the demo: `style`, `facts`, per cent), float or null. Of pairs and labels:
    `accuracy`, `margin`, and `logp_likelier`, the log-probability in nats of the likelier answer of a row, of
    answers with a label only of rows with a desirable one.
    """

    kind: Required[Literal["eval"]]
    loss: Annotated[Real | None, of("nats per supervised token", "of held-out documents")]
    perplexity: Annotated[Real | None, of("exp(loss)")]
    bits_per_byte: Annotated[Real | None, of("bits per byte of text", "loss / ln 2 x tokens / bytes")]
    tokens: Annotated[Int, of("tokens", "supervised tokens it was taken on")]
    seconds: Annotated[Real, of("seconds", "that it took")]
    rows: Annotated[Int, of("rows", "held out, equal ones counted once")]
    fingerprint: Annotated[AnyText, of("hash", "of the held-out documents: only equal ones are compared")]
    changes: Annotated[list[Change], of("object", "since the first one, and since the lowest loss so far")]


class SampleEvent(CommonFields):
    """A prompt and the model's answer."""

    kind: Literal["sample"]
    when: Annotated[When, of("before, during or after training")]
    index: NotRequired[Annotated[Int, of("number", "of the prompt")]]
    prompt: Annotated[AnyText, of("text", "what was asked, as shown")]
    text: Annotated[AnyText, of("text", "the greedy answer")]
    source: NotRequired[Annotated[PromptSource, of("where the prompt is from")]]


class OnPolicyEvent(CommonFields):
    """A step of distillation on the student's own answers, sampled right before it."""

    kind: Literal["on_policy"]
    answers: Annotated[Int, of("answers", "of the step, one a document")]
    tokens: Annotated[Int, of("tokens", "sampled, all of them supervised")]
    ended: Annotated[Real, of("share, 0 to 1", "of the answers that ended by themselves")]
    seconds: Annotated[Real, of("seconds", "that the sampling took")]


class GapEvent(CommonFields):
    """How far the model that samples and the model that trains are apart, measured on the sample answers.

    The first goes token by token with a cache, the second takes one packed pass. The gap is the absolute
    difference of their log-probabilities of each sampled token. Carries a `warning` above 1e-4 nats in
    float32; in bfloat16 rounding alone makes a mean of 0.0005 to 0.008 and at times 0.3, where it turns a
    router's choice (tiny-k2).
    """

    kind: Literal["gap"]
    when: Annotated[When, of("before, during or after training")]
    logprob_gap_mean: Annotated[Real, of("nats", "mean over the tokens")]
    logprob_gap_max: Annotated[Real, of("nats", "largest")]
    logprob_gap_tokens: Annotated[Int, of("tokens", "sampled tokens compared")]
    seconds: NotRequired[Annotated[Real, of("seconds", "that answering and comparing took")]]


class GroupReceipt(TypedDict, total=False):
    """What learned in one group of modules.

    More of each: make_receipt in `src/unfreeze/adapters/receipt.py`.
    """

    parameters: Annotated[Int, of("parameters", "base weights; a packed 4-bit weight is one")]
    trained: Annotated[Int | bool, of("parameters", "that train; 0: frozen")]
    sites: Annotated[Int, of("matrices", "trained ones")]
    sites_reached: Annotated[Int, of("matrices", "whose output had a gradient")]
    sites_moved: Annotated[Int, of("matrices", "of these, that moved")]
    grad_norm: Annotated[Real | None, of("L2 norm before clipping")]
    moved: Annotated[Real | None, of("L2 norm", "of the change of the trained parameters")]
    experts: Annotated[Int, of("experts", "of all layers; routed experts only")]
    experts_reached: Annotated[Int, of("experts", "that had a gradient")]
    output_change: Annotated[Real | None, of("change of a logit", "the largest; null where not measured")]
    rounding: Annotated[Real | None, of("change of a logit", "that rounding alone may make")]
    connected: Annotated[bool | None, of("yes or no", "whether it can change a logit; null: not known")]


class LeftOut(TypedDict):
    """Matrices that should have learned and did not."""

    group: Annotated[AnyText, of("name", "of the group of modules")]
    sites: Annotated[AnyText, of("name", "of the matrices, experts as ranges")]
    why: Annotated[AnyText, of("phrase", '"no gradient" and "not moved" are faults')]
    count: NotRequired[Annotated[Int, of("matrices")]]


class ReceiptEvent(CommonFields):
    """After the first step that had a gradient: what learned."""

    kind: Literal["receipt"]
    groups: Annotated[dict[AnyText, GroupReceipt], of("object", "group of modules -> what learned in it")]
    exceptions: NotRequired[
        Annotated[list[LeftOut], of("matrices", "that were reached and have no gradient, or did not move")]
    ]


class SaveEvent(CommonFields):
    """A checkpoint is complete."""

    kind: Literal["save"]
    path: Annotated[AnyText, of("folder inside the run folder", "written, synced and renamed")]
    bytes: NotRequired[Annotated[Int, of("bytes", "of its tensors")]]
    seconds: NotRequired[Annotated[Real, of("seconds", "that writing took; no step was made meanwhile")]]


class WarningEvent(CommonFields):
    """What the run did otherwise than asked, or what its user should know."""

    kind: Literal["warning"]
    message: Annotated[AnyText, of("sentence")]


class EarlyStopEvent(CommonFields):
    """The run ends before its last step: validation after validation found no lower held-out loss."""

    kind: Literal["early_stop"]
    validations: Annotated[Int, of("validations", "in a row without a lower loss")]
    best_step: NotRequired[Annotated[Int, of("finished optimizer steps", "where the loss was lowest")]]
    best_loss: NotRequired[Annotated[Real, of("nats per supervised token", "held out, at that step")]]


class EndEvent(CommonFields):
    """The loop ended in order; a killed run has none."""

    kind: Literal["end"]
    reason: Annotated[Literal["done", "interrupted"], of("done or interrupted")]
    steps: Annotated[Int, of("finished optimizer steps", "of the whole run")]
    tokens_per_second: Annotated[
        Real | None, of("tokens per second of this session", "null where it made no step")
    ]


Event = (
    DataEvent
    | PlanEvent
    | TimingEvent
    | LoadEvent
    | StartEvent
    | KernelsEvent
    | TrainEvent
    | StreamEvent
    | EvalEvent
    | SampleEvent
    | OnPolicyEvent
    | GapEvent
    | ReceiptEvent
    | SaveEvent
    | WarningEvent
    | EarlyStopEvent
    | EndEvent
)


@cache
def event_kind(event: Any) -> str:
    """TrainEvent -> "train"."""
    return get_args(get_type_hints(event)["kind"])[0]


KINDS: dict[str, Any] = {event_kind(each): each for each in get_args(Event)}
"""Kind -> its TypedDict."""
FURTHER = ("train", "eval")
"""Kinds that may hold more fields than are listed: metrics of an objective, scores of a probe."""
