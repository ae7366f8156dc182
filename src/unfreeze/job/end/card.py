"""Files beside an adapter for its users: the tokenizer files and a model card (README.md).

The card's front matter is the Hub's: base_model, library_name, license, tags. It names files and folders by
their last part, and a run's adapter by the run, too: no local paths.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unfreeze.checkpoint.manifest import inside
from unfreeze.config.adapter import PACKED, ROPE, RoundedAs, kind_of, new_token_ids
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.core.longer import Longer
from unfreeze.core.schema import DataEvent
from unfreeze.core.units import plural
from unfreeze.job.merge_aware import merge_flags
from unfreeze.models import ONLY_HERE
from unfreeze.models.longer import fields_of
from unfreeze.models.wrappers import WRAPPERS
from unfreeze.quant.formats import unpacking
from unfreeze.report.events import last
from unfreeze.report.run import facts, read_run
from unfreeze.report.verdict import rerun_command, verdict

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.checkpoint.packing import OnLoad

CARD = "README.md"
ADAPTER_FOLDER, BEST = "adapter", "adapter-best"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LICENSE = re.compile(
    r"^(license(?:_name|_link)?):[ \t]*[\"']?([^\s\"'\[\]{}]{1,200})[\"']?[ \t]*$", re.MULTILINE
)
PEFT = """Training further in peft makes another model: gate and up of a routed expert share one pair, and
peft also trains the zeros beside their blocks. `unfreeze sft --adapter FOLDER` continues this
adapter exactly.
"""
TOKENS_ADDED = """It has new tokens; the tokenizer here has them too. Before PeftModel.from_pretrained:

```python
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_ID_OF_THIS_ADAPTER")
if len(tokenizer) > model.config.vocab_size:
    model.resize_token_embeddings(len(tokenizer))
```
"""
ADAPTER = "FOLDER_OR_ID_OF_THIS_ADAPTER"
TRAINED_ROUNDED = "It was trained through the rounding of a merge, as the merged model:"
UNMERGED = " `unfreeze chat RUN` rounds too; an export is the LoRA adapter alone, whose answers differ."


def write_beside(
    folder: Path,
    manifest: Manifest,
    base: str,
    run: Path | None,
    files: Sequence[str],
    *,
    reader: str = "peft",
    left_out: Sequence[str] = (),
    base_id: str = "",
    rounded: RoundedAs | None = None,
) -> None:
    """Write the card and the base's tokenizer files into an adapter's folder.

    base: folder or Hub id; base_id: the Hub id that the user gave. run: the run that made it, None if
    unknown. left_out: modules missing from the file because the reader doesn't apply them. rounded: what the
    adapter was trained through.

    Raises CheckpointError if a tokenizer file is a link that leads out of the checkpoint.
    """
    from unfreeze.checkpoint.save import write_file

    for name in files:
        source = manifest.tokens if (manifest.tokens / name).is_file() else manifest.path
        if (source / name).is_file() and (source / name).resolve() != (folder / name).resolve():
            write_file(folder / name, inside(source / name).read_bytes())
    has_experts = any(".experts." in name for name in manifest.tensors)
    text = card(
        base,
        manifest.path,
        run,
        has_experts=has_experts,
        reader=reader,
        base_id=base_id,
        model_type=str(manifest.config.get("model_type")),
        kind=kind_of(folder, run),
        rounded=rounded,
        unpack=_unpacking(manifest),
    )
    if new_token_ids(folder):
        text += TOKENS_ADDED
    if folder.name == BEST:
        text += (
            "This adapter is the step with the lowest held-out loss. The figures above are for the"
            " whole run.\n"
        )
    if manifest.longer is not None:
        text += _longer(manifest.longer)
        rope = asdict(manifest.longer) | {"config": fields_of(manifest.config)}
        write_file(folder / ROPE, json.dumps(rope, indent=2) + "\n")
    else:
        (folder / ROPE).unlink(missing_ok=True)  # an earlier export's
    if manifest.on_load is not None:
        text += _packed(manifest.on_load, base_id or hub_id(base) or Path(base).name)
        packed = {"format": manifest.on_load.format, "modules": list(manifest.on_load.modules)}
        write_file(folder / PACKED, json.dumps(packed) + "\n")
    else:
        (folder / PACKED).unlink(missing_ok=True)
    if left_out:
        text += (
            f"{reader} does not apply {', '.join(left_out)}: their adapters are left out here, so answers"
            " differ from the run's.\n"
        )
    write_file(folder / CARD, text)


def _unpacking(manifest: Manifest) -> tuple[str, str] | None:
    """The lines with which transformers loads the base for peft; None if nothing needs to be said."""
    scheme = None if manifest.on_load else manifest.scheme()
    if scheme is None:
        return None
    modules = dict.fromkeys(name.rpartition(".")[0] for name in manifest.tensors)
    packed = [module for module in modules if scheme.stored(module, manifest.tensors) is not None]
    return unpacking(manifest.config, packed)


def _longer(longer: Longer) -> str:
    """Words of the card on a base whose config.json has to be changed."""
    return (
        f"It was trained with scaled positions ({longer}). The base must be loaded so: write the fields of"
        f" `config` in {ROPE} into its config.json, or into its text_config if it has one (vLLM:"
        " --hf-overrides). `unfreeze` does so itself; `unfreeze merge` writes a checkpoint with them.\n"
    )


def _packed(on_load: OnLoad, base: str) -> str:
    """Words of the card on a base that was packed while it was loaded."""
    to, modules = on_load.format, " ".join(on_load.modules)
    return (
        f"It was trained against the base in {on_load.words} ({modules} packed while they were loaded)."
        f" `unfreeze quantize {base} --to {to} --modules {modules} --out DIR` writes that base. With the base"
        " as it was released, this is a model that was never trained.\n"
    )


def refuse_other_files(folder: Path, base: Path, files: Sequence[str]) -> None:
    """Raise ConfigError if a folder holds files that are not the adapter's.

    The card would replace somebody else's README. A tokenizer file that the base doesn't have would be used,
    and uploaded, as the base's.
    """
    theirs = folder / CARD
    if theirs.is_file() and "- unfreeze" not in theirs.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{theirs} is a README that unfreeze did not write and would replace", next="give another folder"
        )
    other = next((name for name in files if (folder / name).exists() and not (base / name).is_file()), None)
    if other:
        raise ConfigError(
            f"{folder / other} belongs to another model: {base} has no {other}", next="give another folder"
        )


def hub_id(base: str) -> str:
    """Hub id of the base, "" for a local folder."""
    return base if HUB_ID.fullmatch(base) and not Path(base).exists() else ""


def card(
    base: str,
    base_folder: Path,
    run: Path | None,
    *,
    has_experts: bool,
    reader: str = "peft",
    base_id: str = "",
    model_type: str = "",
    kind: str = "LoRA",
    rounded: RoundedAs | None = None,
    unpack: tuple[str, str] | None = None,
) -> str:
    """Text of README.md. It shows how to load the adapter in peft, not in other readers.

    kind: of the adapter (`kind_of`). rounded: what it was trained through. unpack: as in `usage`.
    """
    identity, alone = base_id or hub_id(base), model_type in ONLY_HERE
    name = identity or Path(base).name
    lines = ["---"]
    lines += [f"base_model: {identity}"] if identity else []
    lines += ["library_name: peft"] if reader == "peft" and not alone else []
    lines += ["pipeline_tag: text-generation", *license_of(base_folder)]
    lines += ["tags:", "- lora", "- unfreeze", "---", ""]
    lines += [f"# {run.resolve().name if run else f'Adapter for {name}'}", ""]
    lines += [f"A {kind} adapter for {name}, made with unfreeze.", ""]
    if run is not None and (run / RESOLVED).is_file():
        lines += _of_run(run)
    if flags := merge_flags(rounded):
        lines += [f"{TRAINED_ROUNDED} `unfreeze merge RUN {flags}` writes it.{UNMERGED}", ""]
    if reader != "peft":
        return "\n".join([*lines, f"The files have the layout of {reader}.", ""])
    lines += usage(name, model_type, adapter=ADAPTER, unpack=unpack)
    lines += [PEFT] if has_experts and not alone else []
    return "\n".join(lines)


def usage(
    base: str, model_type: str, *, adapter: str = "", unpack: tuple[str, str] | None = None
) -> list[str]:
    """Section of a card on loading `base` in transformers, with an adapter in peft.

    unpack: a class of transformers and the quantization_config of it that the base is loaded with
    (quant/formats.py).

    A model that only unfreeze has is loaded by it.

    transformers knows kimi_k2 only as DeepSeek-V3 and refuses the name.
    """
    if model_type in ONLY_HERE:
        words = f'"{adapter}" --base "{base}"' if adapter else f'"{base}"'
        only = f"No other program has models of type {model_type}."
        return ["## Use", "", "```bash", f"unfreeze chat {words}", "```", "", only, ""]
    # a wrapper around a text_config, with what it sees by
    names = "AutoModelForImageTextToText" if model_type in WRAPPERS else "AutoModelForCausalLM"
    more, own = (f", {unpack[0]}", ", quantization_config=packing") if unpack else ("", "")
    load = [f'model = {names}.from_pretrained("{base}"{own})']
    if model_type == "kimi_k2":
        names = "DeepseekV3Config, DeepseekV3ForCausalLM"
        load = [
            f'config = DeepseekV3Config.from_pretrained("{base}")',
            'config.model_type = "deepseek_v3"  # transformers does not know kimi_k2',
            f'model = DeepseekV3ForCausalLM.from_pretrained("{base}", config=config{own})',
        ]
    load = [*([f"packing = {unpack[1]}  # peft adapts expanded layers"] if unpack else []), *load]
    lines = ["## Use", "", "```python", *(["from peft import PeftModel"] if adapter else [])]
    lines += [f"from transformers import {names}{more}", "", *load]
    lines += [f'model = PeftModel.from_pretrained(model, "{adapter}")'] if adapter else []
    return [*lines, "```", ""]


def _of_run(folder: Path) -> Iterator[str]:
    """Yield the card's section on the run: model, data, figures and command."""
    run = read_run(folder)
    data = last(run.events, DataEvent)
    yield from (verdict(run), "", "| | |", "|---|---|")
    if data is not None:
        files = data.get("files") or {}
        names = ", ".join(f"{Path(name).name} ({plural(rows, 'row')})" for name, rows in files.items())
        yield from ([f"| Data | {names} |"] if names else [])
        taught = f"{data['supervised_fraction']:.0%} supervised"
        yield f"| Examples | {data['examples']:,}, {data['tokens']:,} tokens, {taught} |"
    for name, value in run.config.items():
        if not name.startswith("lora."):
            continue
        words = ", ".join(map(str, cast(list[Any], value))) if isinstance(value, list) else value
        yield from ([f"| {name} | {words} |"] if value is not None else [])
    yield from (f"| {name} | {value} |" for name, value in facts(run))
    words = [_shared(word) if word.startswith("/") else word for word in shlex.split(rerun_command(run))]
    yield from ("", "```", shlex.join(words), "```", "")


def _shared(path: str) -> str:
    """Return a path without the folders of this machine; an adapter keeps its run's name, which says more."""
    *_, parent, name = ["", *Path(path).parts]
    return f"{parent}/{name}" if name in (ADAPTER_FOLDER, BEST) else name


def license_of(base_folder: Path) -> list[str]:
    """Front-matter lines license, license_name and license_link from the base's own card."""
    path = base_folder / CARD
    if not path.is_file():
        return []
    with inside(path).open(encoding="utf-8", errors="replace") as file:
        head = file.read(20_000)
    if not head.startswith("---"):
        return []
    front = head[3:].partition("\n---")[0]
    return [f"{name}: {json.dumps(value)}" for name, value in LICENSE.findall(front)]
