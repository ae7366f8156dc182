"""The events of a run, typed: a TypedDict per kind, its fields with unit and meaning.

An event is a plain dict, one line of events.jsonl. A field without a value is absent; null means not finite
or not measured. core/conform.py checks events when they are emitted and read. benchmarks/events_page.py makes
the tables of docs/reference/events.md from this file.
"""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Required, get_args, get_type_hints

from typing_extensions import TypedDict

from unfreeze.core.schema_beside import BaselineEvent, ForecastEvent, GapEvent, OnPolicyEvent
from unfreeze.core.schema_types import LARGEST as LARGEST
from unfreeze.core.schema_types import AnyText, CommonFields, Counts, Int, PromptSource, Real, When, of


class NotedRow(TypedDict):
    """A row of the data with a remark."""

    row: Annotated[Int, of("number", "row number in its file, from 1")]
    reason: Annotated[AnyText, of("sentence")]
    file: NotRequired[Annotated[AnyText, of("name", "its file, if there are several")]]


class DataEvent(CommonFields, total=False):
    """Statistics of the data: every row is used, cut, dropped or bad.

    Emitted at each start of the run, before the first step. If rows are encoded during training, it covers
    the rows encoded so far, and a second event covers all rows.
    """

    kind: Required[Literal["data"]]
    summary: Required[Annotated[AnyText, of("sentence", "the statistics in one line")]]
    rows: Required[Annotated[Int, of("rows", "rows of the data files")]]
    examples: Required[Annotated[Int, of("documents", "documents made from the rows")]]
    tokens: Required[Annotated[Int, of("tokens", "of all documents")]]
    supervised: Required[Annotated[Int, of("tokens", "tokens that carry loss, after the shift")]]
    supervised_fraction: Required[Annotated[Real, of("share, 0 to 1", "supervised / tokens")]]
    longest: Required[Annotated[Int, of("tokens", "longest document")]]
    truncated: Required[Annotated[Int, of("rows", "rows that lost tokens")]]
    dropped: Required[Annotated[Int, of("rows", "rows without anything to learn, left out")]]
    bad: Required[Annotated[Int, of("rows", 'unreadable, skipped with data.on_bad_row = "skip"')]]
    shapes: Required[Annotated[dict[AnyText, Int], of("rows", "shape of row -> rows")]]
    notes: Required[Annotated[dict[AnyText, Int], of("rows", "remark -> rows")]]
    listed: Required[Annotated[list[NotedRow], of("rows", "the first dropped and bad ones")]]
    split_rows: Annotated[
        Int, of("rows", "rows split into several examples: one per turn, or pieces of a text")
    ]
    examples_dropped: Annotated[
        Int, of("documents", "examples of split rows without a supervised token, left out")
    ]
    tokens_cut: Annotated[Int, of("tokens", "lost by truncation")]
    cuts: Annotated[list[NotedRow], of("rows", "the first truncated ones")]
    duplicates: Annotated[Int, of("rows", "rows that repeat an earlier row")]
    repeats: Annotated[list[NotedRow], of("rows", "the first of them")]
    held_out: Annotated[Int, of("documents", "set aside for validation")]
    room: Annotated[Int, of("tokens", "of prompts: those of each document that wait for an answer")]
    packing: Annotated[AnyText, of("name", "how documents are packed")]
    efficiency: Annotated[Real | None, of("share, 0 to 1", "share of the token budget that packing fills")]
    reading: Annotated[AnyText, of("name", '"memory", "disk" or "on demand"')]
    files: Annotated[dict[AnyText, Int], of("rows", "file -> rows")]
    mixture: Annotated[list[AnyText], of("sentence", "effect of data.weights on each file")]
    rows_in_files: Annotated[Int, of("rows", "rows in the data files, if not all are encoded yet")]


class Device(TypedDict, total=False):
    """The device of a plan."""

    kind: Annotated[AnyText, of("name", "cpu or cuda")]
    name: Annotated[AnyText, of("name", "the processor's or the GPU's")]
    cores: Annotated[Int, of("cores", "of the host")]
    total: Annotated[Int, of("bytes", "of memory")]
    available: Annotated[Int, of("bytes", "free memory for a process")]
    limit: Annotated[AnyText, of("name", "what limits the memory")]
    process: Annotated[Int, of("bytes", "already used by this process; not part of `available`")]
    host: Annotated[Int, of("bytes", "free host memory, if the device is a GPU")]


class PlannedRollout(TypedDict):
    """A step with rewards in a plan, if every answer takes all its tokens; without grading."""

    step: Annotated[Real, of("seconds", "of a step")]
    sampling: Annotated[Real, of("seconds", "of them, sampling")]
    share: Annotated[Real, of("share", "sampling / step")]
    run: Annotated[Real | None, of("seconds", "of the run; null if its steps are unknown")]


class PlanEvent(CommonFields):
    """The memory plan, emitted before any weight is read."""

    kind: Literal["plan"]
    terms: Annotated[dict[AnyText, Int], of("bytes", "terms of the peak")]
    beside: Annotated[dict[AnyText, Int], of("bytes", "needed at other times than the peak")]
    total: Annotated[Int, of("bytes", "the peak")]
    load: Annotated[Int, of("bytes", "the peak while loading")]
    usable: Annotated[Int, of("bytes", "memory that can be used now")]
    per_device: Annotated[list[Int], of("bytes", "one entry per device")]
    max_over_min: Annotated[Real, of("ratio", "largest over smallest of per_device")]
    expanded_avoided: Annotated[Int, of("bytes", "additional bytes if packed weights were expanded")]
    adapter_parameters: Annotated[Int, of("parameters", "trained ones")]
    seconds_per_pass: Annotated[
        Real | None, of("seconds", "predicted, for a micro-batch and an update; null without rates")
    ]
    rollout: NotRequired[Annotated[PlannedRollout, of("object", "of grpo, if the rates are known")]]
    rates: NotRequired[Annotated[AnyText, of("words", "source of the rates")]]
    fits: Annotated[bool, of("yes or no", "total and load within usable")]
    hardware: Annotated[Device, of("object", "the device of the plan")]
    lines: Annotated[list[AnyText], of("sentences", "the full plan as text (`--plan`)")]
    recompute: NotRequired[Annotated[AnyText, of("name", "recompute policy in backward")]]
    experts: NotRequired[
        Annotated[AnyText, of("name", "place of the routed experts' weights: device, host or disk")]
    ]
    buffer: NotRequired[
        Annotated[
            Int, of("bytes", "limit of each of the two buffers, if a layer's experts are streamed in groups")
        ]
    ]
    groups: NotRequired[
        Annotated[Int, of("groups", "groups per layer in which experts are streamed, for most layers")]
    ]
    split: NotRequired[
        Annotated[Int, of("processes", "processes that share one set of experts, if more than one")]
    ]
    experts_held: NotRequired[Annotated[Int, of("experts", "most experts of a layer held by a process")]]
    weights: NotRequired[
        Annotated[AnyText, of("name", "sharded if every weight is sharded over the processes")]
    ]
    rest: NotRequired[
        Annotated[AnyText, of("name", "peers if each process holds a shard of the other frozen weights")]
    ]
    boundary: NotRequired[
        Annotated[AnyText, of("name", "host if layer inputs are offloaded to host memory until backward")]
    ]
    optimizer: NotRequired[
        Annotated[
            AnyText, of("name", "host if the adapters' moments are offloaded to host memory between updates")
        ]
    ]
    host: NotRequired[
        Annotated[
            Int, of("bytes", "experts, layer inputs and moments in host memory, if the device is a GPU")
        ]
    ]
    save_bytes: NotRequired[Annotated[Int, of("bytes", "size of a save of the training state on disk")]]
    start: NotRequired[Annotated[list[AnyText], of("sentences", "short form for the terminal")]]
    export_for: NotRequired[Annotated[AnyText, of("name", "reader that can load the adapters")]]
    export_note: NotRequired[Annotated[AnyText, of("sentence", "adapters that a reader would not apply")]]
    predicted_kernels: NotRequired[
        Annotated[list[AnyText], of("ops", "ops whose kernel runs unmeasured if the model has the op")]
    ]


class TimingEvent(CommonFields):
    """Emitted at the first start on a CPU, after candidate kernels were compiled and timed."""

    kind: Literal["timing"]
    cells: Annotated[Int, of("kinds of inputs", "kinds whose candidates were timed")]
    seconds: Annotated[Real, of("seconds", "compiling, comparing and timing")]


class LoadEvent(CommonFields):
    """Emitted after the weights are read."""

    kind: Literal["load"]
    bytes: Annotated[Int, of("bytes", "read from the checkpoint")]
    seconds: Annotated[Real, of("seconds")]
    expanded_bytes: Annotated[Int, of("bytes", "the same weights, with packed ones expanded to bf16")]
    rounded: Annotated[Int, of("tensors", "tensors that lost precision in the compute dtype")]
    bytes_by_rank: NotRequired[Annotated[list[Int], of("bytes", "read by each of several processes")]]
    compiles: NotRequired[
        Annotated[bool, of("yes or no", "the first step compiles: no run has made a step here in this dtype")]
    ]


class Metric(TypedDict):
    """Name and format of the loss or of an objective's metric (core/metrics.py)."""

    field: Annotated[AnyText, of("name", "field in the train events")]
    label: Annotated[AnyText, of("words", "displayed name")]
    unit: Annotated[AnyText, of("unit", "unit of the value")]
    over: Annotated[AnyText, of("name", "the mean is over: tokens, rows or steps")]
    mean: NotRequired[
        Annotated[bool, of("yes or no", "training does not change it, so its mean over the run is shown")]
    ]
    live: NotRequired[Annotated[bool, of("yes or no", "the live line shows it")]]


class StartEvent(CommonFields):
    """Emitted at each start of the run, when the training loop starts."""

    kind: Literal["start"]
    steps: Annotated[Int, of("optimizer steps", "of the whole run")]
    resumed: Annotated[bool, of("yes or no", "resumed from a save")]
    model: Annotated[AnyText, of("folder or id", "as configured")]
    data: Annotated[AnyText, of("file", "as configured")]
    processes: NotRequired[Annotated[Int, of("processes", "processes of the run, if there are several")]]
    begun: NotRequired[
        Annotated[Real, of("seconds since 1970-01-01 UTC", "start of the command; only its first run has it")]
    ]
    metrics: NotRequired[
        Annotated[list[Metric], of("object", "the loss and the objective's metrics, with their display")]
    ]


class KernelChoice(TypedDict):
    """The implementation of an op that runs for a kind of inputs, and how it was chosen.

    `origin` is one of "timed here", "measured here", "measured on its class", "predicted, not measured", "not
    measured" (the reference runs), "by design", "as asked".
    """

    op: Annotated[AnyText, of("name", "as in `unfreeze kernels list`")]
    bucket: Annotated[AnyText, of("words", "the kind of inputs")]
    dtype: Annotated[AnyText, of("name", "of the inputs")]
    runs: Annotated[AnyText, of("name", "of the implementation")]
    origin: Annotated[AnyText, of("words", "how it was chosen")]
    why: Annotated[AnyText, of("words", "the reason with its number")]


class KernelsEvent(CommonFields):
    """Kernels that ran for the first time in this session.

    Emitted after the first step, and after a later step with a new kind of inputs.
    """

    kind: Literal["kernels"]
    choices: Annotated[list[KernelChoice], of("object", "in the order of choice")]


class ExpertBalance(TypedDict):
    """Load balance of a mixture-of-experts layer in a step; null without a token.

    Computed from the tokens n_e of its E experts, with mean m. Formulas: `src/unfreeze/core/balance.py`.
    """

    max_violation: Annotated[
        Real | None, of("busiest expert over the mean, minus 1", "MaxVio: 0 is even, E / top_k - 1 the worst")
    ]
    entropy: Annotated[Real | None, of("share of ln(experts), 0 to 1", "-sum p ln p / ln E, p = n / sum(n)")]
    dead: Annotated[Int, of("experts", "experts without a token")]


class TrainEvent(CommonFields, total=False):
    """Emitted after each optimizer step.

    Further fields are metrics of the objective (`correct`: share of supervised tokens whose largest logit is
    the target), float or null. A step refused for a non-finite value has `loss` null and `error`.
    """

    kind: Required[Literal["train"]]
    loss: Required[
        Annotated[Real | None, of("nats per supervised token", "over all micro-batches and processes")]
    ]
    grad_norm: Required[Annotated[Real | None, of("L2 norm before clipping", "of all trained parameters")]]
    epoch: Annotated[Real, of("passes over the data", "finished after this step, by the cursor")]
    tokens: Annotated[Int, of("tokens", "of the step")]
    supervised_tokens: Annotated[Int, of("tokens", "of the step, weight > 0")]
    seconds: Annotated[Real, of("seconds", "of the step, without hooks and saving")]
    learning_rate: Annotated[Real, of("per step", "read back from the optimizer")]
    peak_bytes: Annotated[
        Int, of("bytes", "of the process with most; CUDA: allocated by torch; CPU: resident")
    ]
    fragmentation_bytes: Annotated[Int, of("bytes", "CUDA: reserved minus allocated")]
    applied: Annotated[bool, of("yes or no", "false if the spike guard skipped the update")]
    expert_load: Annotated[dict[AnyText, Counts], of("tokens per expert", "layer[.pass] -> of each expert")]
    expert_balance: Annotated[dict[AnyText, ExpertBalance], of("object", "layer -> its load balance")]
    experts_flipped: Annotated[dict[AnyText, Real], of("share", "layer -> replayed choices not its own")]
    error: Annotated[AnyText, of("sentence", "the non-finite value; the weights were not updated")]


class StreamEvent(CommonFields):
    """Emitted after each step of a run with weights off the device: transfers since the last step.

    Held-out passes between two steps count towards the later one. The hidden share is 1 - waited / seconds.
    """

    kind: Literal["stream"]
    source: Annotated[AnyText, of("name", "host or disk for experts; peers for the other weights")]
    reads: Annotated[Int, of("layers", "layers transferred")]
    bytes: Annotated[Int, of("bytes", "bytes transferred")]
    seconds: Annotated[Real, of("seconds", "duration of the transfers")]
    waited: Annotated[Real, of("seconds", "part of it spent waiting, without computation")]
    hidden: Annotated[
        Real | None, of("share, 0 to 1", "share of the transfers hidden by computation; null: no transfers")
    ]


class Change(TypedDict):
    """Change of a held-out measure since an earlier validation, paired by row.

    Formulas: `src/unfreeze/evaluate/by_row.py`.
    """

    measure: Annotated[AnyText, of("field", "of this event")]
    since: Annotated[
        Int, of("finished optimizer steps", "at the earlier validation: 0, or that of the lowest loss")
    ]
    change: Annotated[Real, of("as the measure", "now minus then")]
    error: Annotated[Real | None, of("as the measure", "standard error of the change; null with one row")]


class EvalEvent(CommonFields, total=False):
    """Held-out loss, or the score of a probe.

    Further fields are scores (the demo: `style`, `facts`, per cent), float or null. For pairs and labels:
    `accuracy`, `margin`, and `logp_likelier`, the log-probability in nats of a row's likelier answer (with
    labels: only rows with a desirable answer). With rewards: `reward`, `pass_1`, `pass_2` and `pass_4`, each
    with the ends of its 95 % interval (`_low`, `_high`), `solved`, `length` and `failed`.
    """

    kind: Required[Literal["eval"]]
    loss: Annotated[Real | None, of("nats per supervised token", "of held-out documents")]
    perplexity: Annotated[Real | None, of("exp(loss)")]
    bits_per_byte: Annotated[Real | None, of("bits per byte of text", "loss / ln 2 x tokens / bytes")]
    tokens: Annotated[Int, of("tokens", "supervised tokens measured")]
    seconds: Annotated[Real, of("seconds", "duration")]
    rows: Annotated[Int, of("rows", "held-out rows; equal ones count once")]
    fingerprint: Annotated[AnyText, of("hash", "of the held-out documents; only equal hashes are compared")]
    changes: Annotated[
        list[Change], of("object", "since the first validation, and since the lowest loss so far")
    ]


class ScoreEvent(CommonFields):
    """One measure of a task that is scored while a run trains (`--watch.eval`)."""

    kind: Literal["score"]
    task: Annotated[AnyText, of("name", "as the user wrote it")]
    measure: Annotated[AnyText, of("name", "such as exact")]
    unit: Annotated[AnyText, of("name", '"share"; "" if the measure says it')]
    higher_is_better: Annotated[bool, of("yes or no")]
    value: Annotated[Real | None, of("as the unit", "null if no item has a score")]
    low: Annotated[Real | None, of("as the unit", "lower end of its 95 % interval (bootstrap over items)")]
    high: Annotated[Real | None, of("as the unit", "upper end")]
    items: Annotated[Int, of("items", "with a score")]
    chooses: Annotated[bool, of("yes or no", "true for the measure that chooses the best step")]
    seconds: Annotated[Real, of("seconds", "duration of the task; 0 for its further measures")]


class SampleEvent(CommonFields):
    """A prompt and the model's answer."""

    kind: Literal["sample"]
    when: Annotated[When, of("before, during or after training")]
    index: NotRequired[Annotated[Int, of("number", "of the prompt")]]
    prompt: Annotated[AnyText, of("text", "the prompt as displayed")]
    text: Annotated[AnyText, of("text", "the greedy answer")]
    source: NotRequired[Annotated[PromptSource, of("where the prompt is from")]]


class RolloutEvent(CommonFields):
    """The answers of a step of `unfreeze grpo`, or of the first step of several that train on them."""

    kind: Literal["rollout"]
    reward: Annotated[Real | None, of("mean", "of the answers with a reward")]
    parts: Annotated[dict[AnyText, Real | None], of("mean", "of each part of the reward")]
    groups: Annotated[Int, of("groups", "prompts answered, also those that were replaced")]
    signal: Annotated[Int, of("groups", "whose answers have different rewards")]
    answers: Annotated[Int, of("answers", "sampled")]
    tokens: Annotated[Int, of("tokens", "sampled")]
    cut: Annotated[Real, of("share, 0 to 1", "answers that reached the longest length")]
    outcomes: Annotated[dict[AnyText, Int], of("answers", "with a reward (ok), or why without one")]
    seconds: Annotated[Real, of("seconds", "duration of the sampling")]
    grading_seconds: Annotated[Real, of("seconds", "duration of the grading")]
    turns: NotRequired[Annotated[Real | None, of("mean", "turns of an answer with an environment")]]
    agreement: NotRequired[Annotated[Real | None, of("share, 0 to 1", "pairs judged alike in both orders")]]
    faults: NotRequired[Annotated[dict[AnyText, Int], of("calls", "of tools that went wrong, by kind")]]


class GroupReceipt(TypedDict, total=False):
    """Learning in one group of modules; see make_receipt in `src/unfreeze/adapters/receipt.py`."""

    parameters: Annotated[Int, of("parameters", "base weights; a packed 4-bit weight counts as one")]
    trained: Annotated[Int | bool, of("parameters", "trained parameters; 0: frozen")]
    sites: Annotated[Int, of("matrices", "trained matrices")]
    sites_reached: Annotated[Int, of("matrices", "matrices whose output had a gradient")]
    sites_moved: Annotated[Int, of("matrices", "those of them that moved")]
    grad_norm: Annotated[Real | None, of("L2 norm before clipping")]
    moved: Annotated[Real | None, of("L2 norm", "of the change of the trained parameters")]
    experts: Annotated[Int, of("experts", "routed experts of all layers")]
    experts_reached: Annotated[Int, of("experts", "experts that had a gradient")]
    frozen_moved: Annotated[Int, of("rows", "that do not train, of weights that train in part, that moved")]
    output_change: Annotated[Real | None, of("change of a logit", "the largest; null where not measured")]
    rounding: Annotated[Real | None, of("change of a logit", "the change that rounding alone can make")]
    connected: Annotated[bool | None, of("yes or no", "true if it can change a logit; null: unknown")]


class LeftOut(TypedDict):
    """Matrices that should have learned but did not."""

    group: Annotated[AnyText, of("name", "of the group of modules")]
    sites: Annotated[AnyText, of("name", "of the matrices, experts as ranges")]
    why: Annotated[AnyText, of("phrase", '"no gradient" and "not moved" are faults')]
    count: NotRequired[Annotated[Int, of("matrices")]]


class ExpertOpCompared(TypedDict):
    """The expert op of one layer beside the reference, on rows of the first step."""

    layer: Annotated[AnyText, of("name", "of the module")]
    rows: Annotated[Int, of("rows", "compared; 0: too expensive here")]
    error: NotRequired[Annotated[Real | None, of("share of the norm", "the largest of output and gradients")]]
    limit: Annotated[Real, of("share of the norm", "above this it is more than rounding")]
    gradients: Annotated[bool, of("yes or no", "false: experts are too large, only the output")]


class ReceiptEvent(CommonFields):
    """Emitted after the first step with a gradient: which modules learned."""

    kind: Literal["receipt"]
    groups: Annotated[dict[AnyText, GroupReceipt], of("object", "group of modules -> its learning")]
    exceptions: NotRequired[
        Annotated[
            list[LeftOut], of("matrices", "matrices that were reached but have no gradient, or did not move")
        ]
    ]
    expert_op: NotRequired[Annotated[ExpertOpCompared, of("object", "of a model with routed experts")]]


class SaveEvent(CommonFields):
    """Emitted when a save is complete."""

    kind: Literal["save"]
    path: Annotated[AnyText, of("folder inside the run folder", "written, synced and renamed")]
    bytes: NotRequired[Annotated[Int, of("bytes", "of its tensors")]]
    seconds: NotRequired[Annotated[Real, of("seconds", "duration of writing, during which training waits")]]


class WarningEvent(CommonFields):
    """A deviation from the request, or something that the user should know."""

    kind: Literal["warning"]
    message: Annotated[AnyText, of("sentence")]


class EarlyStopEvent(CommonFields):
    """The run stops before its last step, because validations found no lower held-out loss."""

    kind: Literal["early_stop"]
    validations: Annotated[Int, of("validations", "in a row without a lower loss, or scores, a better one")]
    best_step: NotRequired[Annotated[Int, of("finished optimizer steps", "step with the lowest loss")]]
    best_loss: NotRequired[
        Annotated[
            Real,
            of("nats per supervised token", "held-out loss there; with best_by its score, lower is better"),
        ]
    ]
    best_by: NotRequired[Annotated[AnyText, of("name", "task whose score chose; none: the held-out loss")]]


class EndEvent(CommonFields):
    """Emitted when the loop ends normally; a killed run has none."""

    kind: Literal["end"]
    reason: Annotated[Literal["done", "interrupted"], of("done or interrupted")]
    steps: Annotated[Int, of("finished optimizer steps", "of the whole run")]
    tokens_per_second: Annotated[
        Real | None, of("tokens per second of this session", "null if it made no step")
    ]


Event = (
    DataEvent
    | BaselineEvent
    | ForecastEvent
    | PlanEvent
    | TimingEvent
    | LoadEvent
    | StartEvent
    | KernelsEvent
    | TrainEvent
    | StreamEvent
    | EvalEvent
    | ScoreEvent
    | SampleEvent
    | OnPolicyEvent
    | RolloutEvent
    | GapEvent
    | ReceiptEvent
    | SaveEvent
    | WarningEvent
    | EarlyStopEvent
    | EndEvent
)


@cache
def event_kind(event: Any) -> str:
    """Return the kind of an event type: TrainEvent -> "train"."""
    return get_args(get_type_hints(event)["kind"])[0]


KINDS: dict[str, Any] = {event_kind(each): each for each in get_args(Event)}
"""Kind -> its TypedDict."""
FURTHER = ("train", "eval")
"""Kinds with further fields than those listed: metrics of an objective, scores of a probe."""
