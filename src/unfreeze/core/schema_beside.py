"""Events of measurements beside the training steps: forecast, n-grams, answers, gap (see schema.py)."""

from typing import Annotated, Literal, NotRequired

from typing_extensions import TypedDict

from unfreeze.core.schema_types import CommonFields, Int, Real, When, of


class NGram(TypedDict):
    """A byte n-gram, counted on the training rows and measured on the held-out rows."""

    order: Annotated[Int, of("bytes", "n: a byte is predicted from the n - 1 before it")]
    bits_per_byte: Annotated[Real, of("bits per byte of text", "of the held-out rows")]


class BaselineEvent(CommonFields):
    """Prediction of the held-out rows by counting: a scale for bits per byte (evaluate/ngrams.py).

    Emitted by `unfreeze pretrain` before the first step, if rows are held out.
    """

    kind: Literal["baseline"]
    ngrams: Annotated[list[NGram], of("object", "by order")]
    train_bytes: Annotated[Int, of("bytes", "of the training rows that were counted")]
    all_rows: Annotated[bool, of("yes or no", "false: there are more training rows than were counted")]
    held_out_bytes: Annotated[Int, of("bytes", "of the held-out rows that were measured")]
    all_held_out: Annotated[bool, of("yes or no", "false: there are more held-out rows than were measured")]
    seconds: Annotated[Real, of("seconds", "duration")]


class ForecastEvent(CommonFields):
    """Time of the whole run, forecast from its first steps (report/forecast.py)."""

    kind: Literal["forecast"]
    seconds: Annotated[Real, of("seconds", "from this session's start event to the end event")]
    left: Annotated[Real, of("seconds", "from this event to the end event")]
    per_step: Annotated[Real, of("seconds", "of a step, without compiling, validation and saving")]
    validation: Annotated[Real, of("seconds", "of them: validations to come, with their answers")]
    saving: Annotated[Real, of("seconds", "of them: saves to come")]
    usd: NotRequired[Annotated[Real, of("USD", "seconds at watch.usd_per_hour")]]


class OnPolicyEvent(CommonFields):
    """A distillation step on the student's own answers, sampled directly before it."""

    kind: Literal["on_policy"]
    answers: Annotated[Int, of("answers", "of the step, one per document")]
    tokens: Annotated[Int, of("tokens", "sampled tokens; all are supervised")]
    ended: Annotated[Real, of("share, 0 to 1", "share of the answers that stopped with an end token")]
    seconds: Annotated[Real, of("seconds", "duration of the sampling")]


class GapEvent(CommonFields):
    """Gap between sampler and trainer, measured on the sample answers.

    The sampler decodes token by token with a KV cache; the trainer runs one packed pass. The gap is the
    absolute difference of their log-probabilities of each sampled token. There is a `warning` above 1e-4 nats
    in float32. In bfloat16, rounding alone makes a mean of 0.0005 to 0.008, and sometimes 0.3 if it changes a
    router's choice (tiny-k2).
    """

    kind: Literal["gap"]
    when: Annotated[When, of("before, during or after training")]
    logprob_gap_mean: Annotated[Real, of("nats", "mean over the tokens")]
    logprob_gap_max: Annotated[Real, of("nats", "largest")]
    logprob_gap_tokens: Annotated[Int, of("tokens", "sampled tokens compared")]
    seconds: NotRequired[Annotated[Real, of("seconds", "duration of answering and comparing")]]
