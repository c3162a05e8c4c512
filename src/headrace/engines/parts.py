"""Which part of a model is wanted, and what is built for it: the language model alone, the encoders alone, some layers, some experts.

A part is described against the whole model, which is built on the meta device and so costs nothing: every parameter of the whole has one in the part, or belongs to a group
that is left out. `parts_selection` carries that over to stored tensors. No family of models has a table here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedConfig

from headrace.engines.conversion import build_skeleton
from headrace.engines.parts_experts import ExpertCut
from headrace.engines.parts_language import Language, find_language, stand_alone
from headrace.engines.parts_layers import LayerCut, check_stage
from headrace.engines.parts_leftout import LeaveOut
from headrace.errors import InvalidSetting

logger = logging.getLogger("headrace")


class Cut(Protocol):
    """One thing that is taken out of a model, by the names of what it is taken out of."""

    def apply(self, model: Any) -> None:
        """Take it out of ``model`` (on the meta device, just built)."""

    def rename(self, name: str) -> str | None:
        """Return what a parameter is called afterwards; None where it is gone."""

    def group(self, name: str) -> str:
        """Return the word for what a parameter that is gone belonged to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWishes:
    """What the caller wants of a model. By default all of it."""

    language_only: bool = False
    """The language model of a multimodal checkpoint, without its encoders."""
    encoder_only: bool = False
    """The encoders and projectors of a multimodal checkpoint, without its language model."""
    layers: range | None = None
    """These decoder layers."""
    experts: tuple[int, ...] | None = None
    """These experts of each layer, in rising order."""

    def __post_init__(self) -> None:
        if self.encoder_only and (self.language_only or self.layers is not None or self.experts is not None):
            raise InvalidSetting(
                "encoder_only cannot be joined with language_only, layers or experts.",
                "They are about the language model, which encoder_only leaves out.",
                "Load the two in two calls.",
            )
        if self.layers is not None and (self.layers.step != 1 or not self.layers or self.layers.start < 0):
            raise InvalidSetting(
                f"layers is {self.layers!r}.", "It must be a range of layers that follow each other.", "range(0, 12)."
            )
        if self.experts is not None and (not self.experts or self.experts[0] < 0):
            raise InvalidSetting(
                f"experts is {list(self.experts)}.", "It must name at least one expert, from 0 on.", "range(0, 64)."
            )

    @classmethod
    def of(
        cls,
        *,
        language_only: bool = False,
        encoder_only: bool = False,
        layers: range | None = None,
        experts: Iterable[int] | None = None,
    ) -> PartWishes:
        """Return the wishes for what callers pass. Raises `InvalidSetting` for what makes no sense."""
        if layers is not None and not isinstance(layers, range):
            raise InvalidSetting(f"layers is {layers!r}.", "It must be a range, such as range(0, 12).")
        chosen = None if experts is None else tuple(sorted(set(experts)))
        return cls(language_only=language_only, encoder_only=encoder_only, layers=layers, experts=chosen)

    @property
    def is_whole(self) -> bool:
        return not (self.language_only or self.encoder_only or self.layers is not None or self.experts is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is built, and how its parameters are called in the whole model."""

    model_class: Any
    config: Any
    whole: Any
    """The whole model on the meta device."""
    own: Any
    """The part on the meta device."""
    names: Mapping[str, str]
    """Parameter or buffer of the whole → the part's, for all that the part has."""
    groups: Mapping[str, str]
    """Parameter or buffer of the whole that the part has not → the word for what it belongs to: ``vision_tower``, ``other layers``."""
    cuts: Sequence[Cut] = ()
    experts: tuple[int, ...] | None = None

    def cut(self, model: Any) -> None:
        """Make the part of ``model``, which has just been built of ``model_class`` and ``config`` on the meta device."""
        for cut in self.cuts:
            cut.apply(model)


def plan_part(model_class: Any, config: Any, wishes: PartWishes, *, source: str) -> Part | None:
    """Return the part of ``model_class`` that is wished for; None where that is all of it.

    Raises `InvalidSetting` where there is no such part, or where it cannot be taken out.
    """
    if wishes.is_whole:
        return None
    whole = build_skeleton(model_class, config)
    language = find_language(whole)
    if wishes.language_only or wishes.encoder_only:
        _check_separable(config, language, source, model_class)
    if language is None and wishes.encoder_only:
        raise _no_encoder(source, f"{model_class.__name__} is a language model.")
    if language is None and wishes.layers is None and wishes.experts is None:
        logger.info("%s: %s is a language model and nothing else; all of it is loaded", source, model_class.__name__)
        return None
    if language is not None and wishes.layers is not None and not wishes.language_only:
        raise InvalidSetting(
            f"layers of {source} can be loaded with language_only only.",
            f"{model_class.__name__} holds encoders beside its decoder layers.",
            "Pass language_only=True, and load the encoders with encoder_only=True elsewhere.",
        )
    build = _Build(model_class, config, whole)
    if language is not None and wishes.language_only:
        build.keep_language(language)
    if language is not None and wishes.encoder_only:
        build.take_out(LeaveOut.language(whole, language))
    if wishes.layers is not None:
        cut = LayerCut.plan(build.skeleton(), wishes.layers, source=source)
        check_stage(build.skeleton(), cut, source=source)
        build.take_out(cut)
    if wishes.experts is not None:
        build.take_out(ExpertCut(wishes.experts, source=source))
    part = build.part(wishes.experts)
    if not part.names:
        raise _no_encoder(source, "Its configuration switches all encoders off.")
    return part


def _check_separable(config: Any, language: Language | None, source: str, model_class: Any) -> None:
    """Raise where a model that has more than a language model does not hold it apart."""
    is_encoder_decoder = any(
        getattr(it, "is_encoder_decoder", False) for it in (config, config.get_text_config(decoder=True))
    )
    is_composed = any(isinstance(it, PreTrainedConfig) for it in vars(config).values())
    if not is_encoder_decoder and (language is not None or not is_composed):
        return
    raise InvalidSetting(
        f"{source} cannot be taken apart into a language model and encoders.",
        f"The decoder of {model_class.__name__} attends to what its encoder makes of the input."
        if is_encoder_decoder
        else f"{model_class.__name__} does not hold its language model apart from the rest.",
        "Load the whole model.",
    )


def _no_encoder(source: str, why: str) -> InvalidSetting:
    return InvalidSetting(f"encoder_only was asked for, and {source} has no encoder.", why, "Leave encoder_only out.")


class _Build:
    """A part in the making: names of the whole are carried along through every cut."""

    def __init__(self, model_class: Any, config: Any, whole: Any) -> None:
        self.model_class = model_class
        self.config = config
        self.whole = whole
        self.own: Any = None
        self.names = {name: name for name in whole.state_dict()}
        self.groups: dict[str, str] = {}
        self.cuts: list[Cut] = []

    def keep_language(self, language: Language) -> None:
        """Go on with the class of the language model alone; where it has none, with the whole class without everything else."""
        alone = stand_alone(self.whole, language)
        cut = LeaveOut.all_but_language(self.whole, language)
        if alone is None:
            self.take_out(cut)
            return
        self.model_class, self.config, self.own = alone.model_class, alone.config, alone.own
        self.groups = {name: cut.group(name) for name in self.names if name not in alone.names}
        self.names = dict(alone.names)

    def skeleton(self) -> Any:
        """Return what has been built so far, on the meta device."""
        if self.own is None:
            self.own = build_skeleton(self.model_class, self.config)
        return self.own

    def take_out(self, cut: Cut) -> None:
        cut.apply(self.skeleton())
        kept: dict[str, str] = {}
        for name, before in self.names.items():
            after = cut.rename(before)
            if after is None:
                self.groups[name] = cut.group(before)
            else:
                kept[name] = after
        self.names = kept
        self.cuts.append(cut)

    def part(self, experts: tuple[int, ...] | None) -> Part:
        assert set(self.names.values()) == set(self.skeleton().state_dict()), "a cut names what it does not take out"
        return Part(
            model_class=self.model_class,
            config=self.config,
            whole=self.whole,
            own=self.own,
            names=self.names,
            groups=self.groups,
            cuts=tuple(self.cuts),
            experts=experts,
        )
