"""Takes modules out of a model that is about to be filled, and leaves in their place one that says so when it is used."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from headrace.engines.parts_language import Language
from headrace.errors import ModelError


class LeftOut(nn.Module):
    """Stands where a module was left out. It has no parameters, and using it is a `ModelError`."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__()
        self.what = what
        self.mend = mend

    def forward(self, *arguments: Any, **options: Any) -> Any:
        _refuse(self.what, self.mend)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            what = self.__dict__.get("what", "a part")
            raise AttributeError(f"This model was loaded without {what}, whose {name} was asked for.") from error

    def extra_repr(self) -> str:
        return self.what


def _refuse(what: str, mend: str, *arguments: Any, **options: Any) -> NoReturn:
    raise ModelError(f"This model was loaded without {what}.", "It cannot be computed with.", mend)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """Takes whole modules out of a model, and parameters that belong to none of them."""

    modules: tuple[str, ...]
    """Paths; none lies below another."""
    parameters: tuple[str, ...] = ()
    base_prefix: str = ""
    mend: str = ""
    bars_forward: bool = False
    """The model's own forward needs what is gone, and says so at once."""

    @classmethod
    def all_but_language(cls, whole: Any, language: Language) -> LeaveOut:
        """Return what leaves only the language model and its head in ``whole``."""
        modules, parameters = [], []
        for path, module in _outside(whole, language):
            if module is None:
                parameters.append(path)
            elif module.state_dict():
                modules.append(path)
        return cls(
            modules=tuple(modules),
            parameters=tuple(parameters),
            base_prefix=whole.base_model_prefix,
            mend="Ask with text alone, or load the model without language_only.",
        )

    @classmethod
    def language(cls, whole: Any, language: Language) -> LeaveOut:
        """Return what leaves only the encoders and projectors in ``whole``."""
        return cls(
            modules=language.paths,
            base_prefix=whole.base_model_prefix,
            mend="Encode with get_image_features, get_video_features or the like, or load the model without encoder_only.",
            bars_forward=True,
        )

    def apply(self, model: Any) -> None:
        for path in self.modules:
            parent, name = _parent(model, path)
            setattr(parent, name, LeftOut(self.group(path), self.mend))
        for path in self.parameters:
            parent, name = _parent(model, path)
            parent.register_parameter(name, None)
        if self.bars_forward:
            refuse = functools.partial(_refuse, self.group(self.modules[0]), self.mend)
            model.forward = functools.update_wrapper(refuse, model.forward)  # others look at its signature
        untie(model)

    def rename(self, name: str) -> str | None:
        gone = name in self.parameters or any(name.startswith(f"{path}.") for path in self.modules)
        return None if gone else name

    def group(self, name: str) -> str:
        """Return the name of the outermost module: ``vision_tower`` for ``model.vision_tower.layers.0.norm1.weight``."""
        return group_of(name, self.base_prefix)


def group_of(name: str, base_prefix: str) -> str:
    """Return the name of the outermost module below the base model that ``name`` lies in."""
    return name.removeprefix(f"{base_prefix}.").partition(".")[0]


def untie(model: Any) -> None:
    """Take out of the ties of ``model`` those whose parameters it has no longer."""
    state = model.state_dict()
    kept = {target: origin for target, origin in model.all_tied_weights_keys.items() if {target, origin} <= set(state)}
    if kept != model.all_tied_weights_keys:
        model.all_tied_weights_keys = kept
        model._tied_weights_keys = dict(kept)


def _outside(whole: Any, language: Language) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield the outermost modules that hold nothing of the language model, and the parameters of modules that hold some of it (with None)."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module | None]]:
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if f"{prefix}{name}" in state:
                yield f"{prefix}{name}", None
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in language.paths:
                continue
            if any(inner.startswith(f"{path}.") for inner in language.paths):
                yield from walk(child, f"{path}.")
            else:
                yield path, child

    state = whole.state_dict()
    yield from walk(whole, "")


def _parent(model: Any, path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition(".")
    return (model.get_submodule(parent) if parent else model), name
