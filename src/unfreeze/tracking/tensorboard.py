"""TensorBoard: runs/<name>/tensorboard/.

Show it with `tensorboard --logdir runs`, which overlays all runs. Uses the tensorboard package's own event
writer, without TensorFlow or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfreeze.core.schema import Event
from unfreeze.tracking import scalars, texts


class Sink:
    """Scalars and texts of each event at its step and time.

    On resume, TensorBoard is told to drop the steps that are repeated (SessionLog.START).
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make_writer = EventFileWriter
        self._record: Any = event_pb2  # generated modules create their classes on import
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._shape: Any = tensor_shape_pb2
        self._folder, self._config = run_dir / "tensorboard", config

    def open(self, step: int) -> None:
        self._writer = self._make_writer(str(self._folder), flush_secs=10)
        if step:
            start = self._record.SessionLog(status=self._record.SessionLog.SessionStatus.START)
            self._writer.add_event(self._record.Event(step=step + 1, session_log=start))
        config = json.dumps(self._config, indent=1, ensure_ascii=False)
        self._writer.add_event(
            self._record.Event(step=step, summary=self._summary.Summary(value=[self._text("config", config)]))
        )

    def log(self, event: Event) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(event).items()
        ]
        values += [self._text(name, words) for name, words in texts(event).items()]
        if values:
            self._writer.add_event(
                self._record.Event(
                    step=event["step"], wall_time=event["time"], summary=self._summary.Summary(value=values)
                )
            )
        if event["kind"] != "train":
            # flush before a save event returns, so that a killed run shows every step up to its save
            self._writer.flush()

    def close(self, done: bool) -> None:
        self._writer.close()

    def _text(self, name: str, words: str) -> Any:
        """Text summary. TensorBoard renders Markdown; four spaces keep a model's text verbatim."""
        shown = "\n".join("    " + line for line in words.splitlines())
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            tensor_shape=self._shape.TensorShapeProto(),
            string_val=[shown.encode("utf-8", "replace")],
        )
        return self._summary.Summary.Value(
            tag=name, metadata=self._summary.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
