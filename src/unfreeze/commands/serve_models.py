"""The models of `unfreeze serve`: one base, and adapters of it by name. Refused before anything is loaded."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.commands.chat import model_name
from unfreeze.config.adapter import CONFIG, ROPE, longer_of, lora_alone, rounded_as
from unfreeze.config.recipes import resolved
from unfreeze.core.command import Common
from unfreeze.core.errors import AdapterError, CheckpointError, ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.job.merge_aware import refuse_beside
from unfreeze.job.opening.device import pick_device, say
from unfreeze.job.opening.load import load_as_trained
from unfreeze.job.opening.source import open_as_trained
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.adapters.several import Several
    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.commands.serve import Config
    from unfreeze.core.longer import Longer
    from unfreeze.generate.model import Model
    from unfreeze.generate.source import ModelSource
    from unfreeze.serve.router import Router
    from unfreeze.serve.service import Service
    from unfreeze.serve.speaker import Speaker
    from unfreeze.serve.versions import Versions

TOGETHER, PROMPT = 8, 32  # requests, and tokens of each, that warm the engine up
PATIENCE = 2.0  # seconds until it is told what the server waits for


@dataclass
class Served:
    """A router, and the adapters that it keeps up to date."""

    router: Router
    versions: Versions | None

    def names(self) -> list[str]:
        """Return the names of the models, the base first."""
        return self.router.names()

    def close(self) -> None:
        """Look for no more adapters."""
        if self.versions is not None:
            self.versions.close()


@dataclass(frozen=True)
class Sources:
    """The models that a server answers with.

    base    as it was resolved, without an adapter unless that is served by itself: more than LoRA, or rounded
    name    of the base
    longer  scaling of positions that the first adapter was trained with
    places  name -> a run's folder or an adapter's
    default  the model that the first source is: "", the base; or the adapter of a run
    """

    base: ModelSource
    manifest: Manifest
    name: str
    longer: Longer | None
    places: Mapping[str, Path]
    default: str = ""


def sources_of(config: Config, tell: Callable[[str], None]) -> Sources:
    """Resolve every source. Raises UserError: no such model, an adapter of another base, a name twice."""
    (first_name, first), *more = [named(source) for source in config.models]
    opened, manifest = open_as_trained(first, tell, config.base)
    places: dict[str, Path] = {}
    longer = longer_of(opened.adapter) if opened.adapter else None
    if opened.adapter is not None and (rounded_as(opened.adapter) or not lora_alone(opened.adapter)):
        if more:
            refuse_beside(opened.adapter, first)
            raise ConfigError(
                f"{first} changes more of its base than LoRA does, so it is served by itself",
                next=f"unfreeze serve {first}, or: unfreeze merge {first} --to bf16",
            )
        return Sources(opened, manifest, config.name or first_name or model_name(first), longer, {})
    base = replace(opened, adapter=None)
    whole = Path(opened.base)
    name = whole.parent.name if whole.name == "model" else whole.name
    default = "" if opened.adapter is None else first_name or model_name(first)
    if default:
        places[default] = Path(first).expanduser()
    elif first_name:
        name = first_name
    name = config.name or name
    for own_name, source in more:
        place = Path(source).expanduser()
        check_base(place, opened, manifest, longer)
        own_name = own_name or model_name(source)
        if own_name in (name, *places):
            raise ConfigError(
                f"two of the models are called {own_name!r}", next=f"give one another name: mine={source}"
            )
        places[own_name] = place
    return Sources(base, manifest, name, longer, places, default)


def refuse_unknown(config: Config) -> None:
    """Raise UserError for models that are not here, before anybody is listened to.

    A base that comes from the Hub is looked for later: it may take minutes.
    """
    from unfreeze.checkpoint.folder import asks_hub
    from unfreeze.generate.source import locate_model

    if not asks_hub(locate_model(named(config.models[0])[1], config.base).base):
        sources_of(config, lambda line: None)


def named(source: str) -> tuple[str, str]:
    """Split NAME=FOLDER. -> ("", source) for a source without a name."""
    name, equals, folder = source.partition("=")
    if equals and folder and "/" not in name and not Path(source).exists():
        return name, folder
    return "", source


def check_base(place: Path, opened: ModelSource, manifest: Manifest, longer: Longer | None) -> None:
    """Raise AdapterError unless an adapter, or a run that trains one, belongs to the base that is served."""
    run, config = place / RESOLVED, place / CONFIG
    alone = f"serve it on its own base, on another port: unfreeze serve {shlex.quote(str(place))} --port 0"
    if run.is_file():
        if (place / "model").is_dir():
            raise AdapterError(f"{place} trained every weight: it is a base of its own", next=alone)
        named = resolved(read_object(run, AdapterError)).get("model")
    elif config.is_file():
        named = read_object(config, AdapterError).get("base_model_name_or_path")
    elif (place / "config.json").is_file():
        raise AdapterError(f"{place} is a checkpoint, not an adapter of {Path(opened.base).name}", next=alone)
    else:
        raise AdapterError(f"{place} is no run and has no {CONFIG}", next="check the path")
    if not isinstance(named, str) or not named:
        return  # the shapes decide, when it is loaded
    if not same_base(named, opened.base, manifest.path):
        theirs, ours = Path(named).name, Path(opened.base).name
        if theirs == ours or theirs == "model":  # two folders of one name, and runs/NAME/model
            theirs, ours = named, opened.base
        raise AdapterError(f"{place} was trained on {theirs}; this server's base is {ours}", next=alone)
    folder = place / "adapter" if run.is_file() else place
    if (folder / CONFIG).is_file() and longer_of(folder) != longer:
        raise AdapterError(f"{place} was trained with other positions ({ROPE})", next=alone)
    if (folder / CONFIG).is_file():
        refuse_beside(folder, str(place))


def same_base(named: str, base: str, path: Path) -> bool:
    """True if an adapter's base is the one that is served.

    Two folders of this machine must be the same; a folder and an id of the Hub, or one of another machine,
    must have the same last name.
    """
    if named == base:
        return True
    theirs = Path(named).expanduser()
    if theirs.exists():
        return theirs.resolve() == path.resolve() or theirs.resolve() == Path(base).expanduser().resolve()
    return bool(theirs.name) and theirs.name in (path.name, Path(base).name) and theirs.name != "model"


def opened(config: Config, service: Service, common: Common) -> Served:
    """Load the base, then its adapters, and make the router. Progress goes to stderr and to /health."""
    tell = say(common)
    sources = sources_of(config, tell)
    model = loaded(sources, config, service, common)
    if model.tokenizer is None:
        raise CheckpointError(
            f"{sources.base.base} has no tokenizer, so a server cannot read text",
            next="copy tokenizer.json into the checkpoint's folder",
        )
    from unfreeze.serve.router import Router
    from unfreeze.serve.session import Speech
    from unfreeze.serve.speaker import Speaker

    several, versions = adapters_of(model, sources, config, tell)
    rows = config.max_rows or None
    speaker = Speaker(model.engine, max_rows=rows, max_wait=config.max_waiting, adapters=several)
    warmed(speaker, several.names if several else (), tell)
    most = config.max_new_tokens
    speech = Speech(model.tokenizer, model.decoder.shape.max_positions, most, longest=most)
    names = (lambda: several.names) if several else tuple
    router = Router(speaker, model.tokenizer, sources.name, speech, adapters=names, default=sources.default)
    return Served(router, versions)


def adapters_of(
    model: Model, sources: Sources, config: Config, tell: Callable[[str], None]
) -> tuple[Several | None, Versions | None]:
    """Load the adapters, and look for new versions of them from now on."""
    if not sources.places:
        return None, None
    from unfreeze.adapters.several import Several
    from unfreeze.serve.versions import Versions

    base = "" if config.base else sources.base.base
    several = Several(model.decoder, base, longer=sources.longer)
    versions = Versions(several, sources.places, tell)
    versions.begin()
    return several, versions


def warmed(speaker: Speaker, names: Sequence[str], tell: Callable[[str], None]) -> None:
    """Let the engine answer once by each adapter, so that no client waits while kernels are compiled."""
    from unfreeze.generate.sampling import Sampling
    from unfreeze.serve.speaker import Work

    waiting = [
        speaker.submit(Work([0] * PROMPT, Sampling(2, temperature=1.0, seeds=(i,)), 2, adapter=name))
        for i, name in enumerate(
            itertools.islice(itertools.cycle(("", *names)), min(TOGETHER, speaker.max_wait))
        )
    ]
    if wait(waiting, PATIENCE).not_done:
        tell("kernels are being compiled, once on this machine; /health says loading until then")
    for each in waiting:
        each.result()


def loaded(sources: Sources, config: Config, service: Service, common: Common) -> Model:
    """Load the base. Its share goes to the service."""
    place = pick_device(config.device)

    from unfreeze.core.garbage import take_up
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.precision import precision
    from unfreeze.tracking.live import LoadProgress

    take_up()  # all imports are done
    with LoadProgress(quiet=common.quiet) as bar:

        def progress(done: int, total: int) -> None:
            service.loaded = done / max(1, total)
            bar(done, total)

        dtype = dtype_of(precision(config.dtype, place).name)
        model = load_as_trained(sources.base, sources.manifest, dtype, place, progress, say(common))
    model.engine.say = say(common)
    return model
