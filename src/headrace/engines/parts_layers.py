"""Takes decoder layers out of a language model, so that what is left is one stage of a pipeline.

The layers that stay are numbered from 0, in the names of parameters, in ``layer_idx`` and in the configuration (``num_hidden_layers``, ``layer_types``), so that caches and
masks of the stage fit it. Embeddings stay with layer 0, the last norm and the head with the last layer; tied embeddings are in both. Before the last stage the model
is called through its base model (``model.model``), whose ``last_hidden_state`` is what the next stage takes as ``inputs_embeds``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.engines.conversion import PlacingClass
from headrace.engines.parts_leftout import LeftOut, untie
from headrace.errors import InvalidSetting

_LISTS = ("layer_types", "kv_sharing_modes")
"""Ends of the names of what a configuration lists for each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """Leaves ``layers`` of a language model's ``num_layers``."""

    layers: range
    num_layers: int
    base: str
    """Path of the module that holds the layers; empty for the model itself."""
    embeddings: str
    """Their path."""
    norm: str
    head: str | None
    keeps_embeddings: bool

    @classmethod
    def plan(cls, model: Any, layers: range, *, source: str) -> LayerCut:
        """Return the cut of ``model`` (on the meta device). Raises `InvalidSetting` for a model that is not a row of layers between embeddings and one norm."""
        total = getattr(model.config, "num_hidden_layers", None)
        base_module = _holder(model, total)
        embeddings = model.get_input_embeddings()
        if base_module is None or embeddings is None or not isinstance(total, int):
            raise _refusal(source, model, "None of its modules holds all its layers in one list.")
        base = "" if base_module is model else _path(model, base_module)
        if layers.stop > total:
            raise InvalidSetting(
                f"layers is {layers!r}.", f"{source} has {total} decoder layers.", f"Stay below {total}."
            )
        head_module = model.get_output_embeddings()
        head = None if head_module is None else _path(model, head_module)
        norm = _norm(model, base_module, embeddings, head_module, source=source)
        _check_independent(model, source)
        shortened = copy.deepcopy(model.config)
        _shorten(shortened, layers, total)
        if shortened.num_hidden_layers != len(layers):
            raise _refusal(source, model, "Its configuration counts layers by a list of its own.")
        is_tied = any(target.startswith(f"{head}.") for target in model.all_tied_weights_keys)
        return cls(
            layers=layers,
            num_layers=total,
            base=base,
            embeddings=_path(model, embeddings),
            norm=norm,
            head=head,
            keeps_embeddings=layers.start == 0 or (is_tied and layers.stop == total),
        )

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    def apply(self, model: Any) -> None:
        """Cut. ``model`` has just been built with all its layers, since which kind a layer is depends on its number."""
        base = model.get_submodule(self.base) if self.base else model
        kept = [base.layers[number] for number in self.layers]
        for number, layer in enumerate(kept):
            _renumber(layer, self.layers[number], number)
        base.layers = nn.ModuleList(kept)
        if not self.keeps_embeddings:
            mend = "Pass the last_hidden_state of the stage before as inputs_embeds."
            _replace(model, self.embeddings, LeftOut(f"embeddings: {self._stage()}", mend))
        if not self.is_last:
            _replace(model, self.norm, nn.Identity())
            if self.head is not None:
                mend = f"Call its {self.base}, and pass the last_hidden_state on to the next stage."
                _replace(model, self.head, LeftOut(f"head: {self._stage()}", mend))
        _shorten(model.config, self.layers, self.num_layers)
        assert model.config.num_hidden_layers == len(kept), "checked before"
        untie(model)

    def rename(self, name: str) -> str | None:
        prefix = f"{self.base}.layers." if self.base else "layers."
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in self.layers:
                return None
            return f"{prefix}{int(number) - self.layers.start}.{rest}"
        gone = [] if self.keeps_embeddings else [self.embeddings]
        if not self.is_last:
            gone += [self.norm, *([self.head] if self.head else [])]
        return None if any(name.startswith(f"{path}.") for path in gone) else name

    def group(self, name: str) -> str:
        prefix = f"{self.base}.layers." if self.base else "layers."
        return "other layers" if name.startswith(prefix) else name.rpartition(".")[0].rpartition(".")[2]

    def _stage(self) -> str:
        return f"it holds layers {self.layers.start} to {self.layers.stop - 1} of {self.num_layers}"


def check_stage(model: Any, cut: LayerCut, *, source: str) -> None:
    """Raise `InvalidSetting` where the class does more than hand hidden states through its layers (it scales what it is given, say), so that stages would not add up.

    Tried with no layer at all, on two positions: what goes in must come out. ``model`` is on the meta device; it stays as it is.
    """
    if cut.layers.start == 0 and cut.is_last:
        return
    base = model.get_submodule(cut.base) if cut.base else model
    size = model.config.hidden_size

    def strip(built: Any) -> None:
        for name, child in list(built.named_children()):
            if any(True for _ in child.parameters()):
                setattr(built, name, nn.ModuleList() if name == "layers" else nn.Identity())
        _shorten(built.config, range(0), cut.num_layers)

    def fill(built: Any, load_config: Any, load_weights: Any) -> tuple[Any, Any]:
        result: tuple[Any, Any] = load_weights(built, {}, load_config)
        return result

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    states = torch.linspace(-1, 1, 2 * size).reshape(1, 2, size)
    try:
        bare = PlacingClass(type(base), fill, strip).from_pretrained(
            None, config=config, state_dict={}, dtype=torch.float32
        )
        with torch.no_grad():
            found = bare(inputs_embeds=states, use_cache=False).last_hidden_state
    except Exception as error:  # whatever a class of someone else's raises when it is used otherwise than it expects
        raise _refusal(source, model, f"{type(base).__name__} cannot be run without layers: {error}.") from error
    if not torch.equal(found, states):
        raise _refusal(source, model, f"{type(base).__name__} changes hidden states outside its layers.")


def _holder(model: Any, num_layers: int | None) -> Any:
    """Return the outermost model in ``model`` that holds all its layers in a list."""
    for module in model.modules():
        found = getattr(module, "layers", None)
        if isinstance(module, PreTrainedModel) and isinstance(found, nn.ModuleList) and len(found) == num_layers:
            return module
    return None


def _norm(model: Any, base: Any, embeddings: Any, head: Any, *, source: str) -> str:
    """Return the path of the one module with parameters that is neither layers nor embeddings nor head."""
    known = {id(embeddings), id(head), id(base), id(getattr(base, "layers", None))}
    others = [
        child
        for holder in ((base,) if base is model else (base, model))
        for child in holder.children()
        if id(child) not in known and child.state_dict()
    ]
    if len(others) != 1 or any(parameter.dim() != 1 for parameter in others[0].parameters()):
        names = ", ".join(_path(model, child) for child in others) or "none"
        raise _refusal(source, model, f"Beside layers, embeddings and head it has {names}, where one norm is expected.")
    return _path(model, others[0])


def _check_independent(model: Any, source: str) -> None:
    """Raise where layers use what other layers keep."""
    config = model.config
    shares = getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    if shares:
        raise _refusal(source, model, "Its layers use keys and values of other layers.")
    if getattr(config, "is_heterogeneous", False):
        raise _refusal(source, model, "Its layers have configurations of their own.")


def _renumber(layer: nn.Module, before: int, after: int) -> None:
    for module in layer.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            assert module.layer_idx == before, "a layer does not know its own number"
            module.layer_idx = after  # type: ignore[assignment]


def _shorten(config: Any, layers: range, num_layers: int) -> None:
    lists: Mapping[str, Any] = {key: value for key, value in vars(config).items() if key.endswith(_LISTS)}
    config.num_hidden_layers = len(layers)
    for key, value in lists.items():
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(config, key, type(value)(value[number] for number in layers))


def _replace(model: Any, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, name, module)


def _path(model: nn.Module, wanted: Any) -> str:
    path: str = next(path for path, module in model.named_modules() if module is wanted)
    return path


def _refusal(source: str, model: Any, why: str) -> InvalidSetting:
    return InvalidSetting(
        f"Layers of {source} cannot be loaded by themselves.", why, f"Load {type(model).__name__} without layers."
    )
