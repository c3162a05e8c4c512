"""One matcher for all lists of names: what each spelling means, and what it does not."""

from __future__ import annotations

import pytest

from headrace.errors import UnsupportedQuantization
from headrace.quantization import matching
from headrace.quantization.matching import NamePatterns, canonical_name, module_kind

KIMI = r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"


def patterns(*listed: str) -> NamePatterns:
    return NamePatterns(listed, place="config.json")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        # Names: whole dotted parts, and what is under them.
        ("lm_head", "lm_head", True),
        ("lm_head", "lm_head.weight", True),
        ("lm_head.weight", "lm_head", True),
        ("lm_head", "lm_head_norm", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("gate", "model.layers.0.mlp.gate", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.", "model.layers.10.mlp.up_proj", False),
        ("self_attn", "model.layers.0.self_attn.q_proj", True),
        ("self_attn", "model.layers.0.cross_self_attn.q_proj", False),
        # Wrappers in front, in either order, or none.
        ("lm_head", "language_model.lm_head", True),
        ("model.embed_tokens", "language_model.model.embed_tokens", True),
        ("model.embed_tokens", "model.language_model.embed_tokens", True),
        ("language_model.model.layers.0.mlp", "model.language_model.layers.0.mlp.up_proj", True),
        ("model.language_model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("language_model.layers.3.self_attn", "language_model.model.layers.3.self_attn.o_proj", True),
        ("language_model.layers.3.self_attn", "language_model.model.layers.30.self_attn.o_proj", False),
        ("vision_tower.blocks.0.fc1", "model.vision_tower.blocks.0.fc1", True),
        ("model.vision_tower", "vision_tower.blocks.0.fc1", True),
        ("model.layers.0.mlp", "vision_tower.model.layers.0.mlp.fc1", False),
        ("language_model", "language_model.model.layers.0.mlp.up_proj", True),
        ("language_model", "lm_head", False),
        ("model", "model.layers.0.mlp.up_proj", True),
        # Globs: a star stands for dots too.
        ("lm_head*", "lm_head", True),
        ("lm_head*", "language_model.lm_head", True),
        ("*.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("*.self_attn*", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0*", "language_model.model.layers.0.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.12.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.[01].mlp", "model.layers.1.mlp.up_proj", True),
        ("model.layers.[01].mlp", "model.layers.2.mlp.up_proj", False),
        ("model.layers.?.mlp", "model.layers.12.mlp.up_proj", False),
        ("model.*", "lm_head", False),
        ("*", "lm_head", True),
        # Regular expressions, from the start of the name, as compressed-tensors has them.
        ("re:.*self_attn.*", "language_model.model.layers.1.self_attn.q_a_proj", True),
        (KIMI, "language_model.model.layers.0.mlp.gate_proj", True),
        (KIMI, "language_model.model.layers.1.mlp.gate", False),
        (KIMI, "language_model.model.layers.1.mlp.experts.7.gate_proj", False),
        (r"re:model\.layers\.0\..*", "language_model.model.layers.0.mlp.up_proj", True),
        (r"re:model\.layers\.0\..*", "language_model.model.layers.10.mlp.up_proj", False),
        (r"re:language_model\.layers\.\d+\.mlp", "language_model.model.layers.7.mlp.up_proj", True),
        (r"re:layers\.[0-4]\.", "model.layers.3.mlp.up_proj", True),
        (r"re:.*lm_head\.weight$", "lm_head", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
        # A whole and its parts.
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj", True),
        ("*.gate_up_proj", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj", False),
        # Classes.
        ("Linear", "model.layers.0.mlp.up_proj", True),
        ("LinearBase", "model.layers.0.mlp.up_proj", True),
        ("Embedding", "model.layers.0.mlp.up_proj", False),
    ],
)  # fmt: skip
def test_a_pattern_means_what_its_writer_meant(pattern: str, name: str, matches: bool) -> None:
    assert patterns(pattern).find(name) == (pattern if matches else None)


def test_a_fused_module_is_meant_by_all_its_parts_or_by_none() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert patterns(*names).find("model.layers.0.self_attn.qkv_proj") == names[0]
    assert patterns(*names).find("model.layers.1.self_attn.qkv_proj") is None
    assert patterns("*.gate_proj", "*.up_proj").find("model.layers.1.mlp.gate_up_proj") == "*.gate_proj"
    with pytest.raises(
        UnsupportedQuantization, match=r"names q_proj, k_proj of model\.layers\.0\.self_attn, but not v_proj"
    ):
        patterns(*names[:2]).find("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(UnsupportedQuantization, match=r"names up_proj of .*, but not gate_proj"):
        patterns(r"re:.*\.0\.mlp\.up_proj").find("model.layers.0.mlp.gate_up_proj")


def test_the_most_exact_pattern_is_found() -> None:
    listed = patterns("Linear", "re:.*mlp.*", "model.layers.0", "model.layers.0.mlp")
    assert listed.find("model.layers.0.mlp.up_proj") == "model.layers.0.mlp"
    assert listed.find("model.layers.0.self_attn.q_proj") == "model.layers.0"
    assert listed.find("model.layers.1.mlp.up_proj") == "re:.*mlp.*"
    assert listed.find("model.layers.1.self_attn.q_proj") == "Linear"
    assert listed.find("model.embed_tokens", kind="Embedding") is None


def test_experts_are_told_apart_where_a_list_does() -> None:
    listed = patterns("model.layers.0.mlp.experts.1", r"re:.*layers\.1\.mlp\.experts\.2\..*", "*experts.3*")
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(2) for expert in (1, 2, 3, 12, 30)]
    found = {
        name.removeprefix("model.").replace(".mlp.experts.", "/") for name in names if listed.find(name) is not None
    }
    assert found == {"layers.0/1.up_proj", "layers.0/3.up_proj", "layers.0/30.up_proj", "layers.1/2.up_proj", "layers.1/3.up_proj", "layers.1/30.up_proj"}  # fmt: skip


@pytest.mark.parametrize("flags", ["", "(?i)"])
def test_expressions_that_cannot_be_joined_are_asked_one_by_one(flags: str) -> None:
    listed = patterns(r"re:.*(\d)\.mlp\.\1", f"re:{flags}.*LAYERS\\.2", r"re:.*(?P<n>\d)x(?P=n)")
    assert listed.find("a.4.mlp.4") == r"re:.*(\d)\.mlp\.\1"
    assert listed.find("a.4.mlp.5") is None
    assert listed.find("a.5x5") is not None and listed.find("a.5x6") is None
    assert (listed.find("a.layers.2") is not None) is bool(flags)


@pytest.mark.parametrize(
    ("listed", "said"), [(["re:("], "not a regular expression"), ([3], "holds 3, which is not a name")]
)
def test_what_is_no_pattern_is_an_error_that_names_it(listed: list[str], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        NamePatterns(listed, place="config.json")


def test_an_empty_list_means_nothing() -> None:
    assert not patterns() and patterns().find("lm_head") is None
    assert patterns("").find("lm_head") is None


def test_names_under_many_experts_cost_one_question_to_each_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answer = matching._Expression.matches

    def counted(self: matching._Expression, name: str, canonical: str) -> bool:
        asked.append(name)
        return answer(self, name, canonical)

    monkeypatch.setattr(matching._Expression, "matches", counted)
    listed = patterns(
        "lm_head", "re:.*self_attn.*", KIMI, *(rf"re:.*layers\.{layer}\.self_attn.*" for layer in range(60))
    )
    for layer in range(60):
        for expert in range(384):
            assert listed.find(f"language_model.model.layers.{layer}.mlp.experts.{expert}.down_proj") is None
    assert asked == []  # the joined expression has said no for all of them
    assert listed.find("model.layers.3.self_attn.q_proj") == "re:.*self_attn.*"
    assert listed.find("model.layers.4.self_attn.q_proj") == "re:.*self_attn.*"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.layers.0.mlp", "layers.0.mlp"),
        ("language_model.model.layers.0.mlp", "layers.0.mlp"),
        ("model.language_model.lm_head.weight", "lm_head"),
        ("model", "model"),
        ("lm_head", "lm_head"),
        ("visual.model.x", "visual.model.x"),
    ],
)
def test_wrappers_are_no_part_of_a_canonical_name(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


@pytest.mark.parametrize(
    ("name", "num_dims", "kind"),
    [
        ("model.layers.0.mlp.up_proj", 2, "Linear"),
        ("lm_head", 2, "Linear"),
        ("model.embed_tokens", 2, "Embedding"),
        ("transformer.wte", 2, "Embedding"),
        ("model.layers.0.mlp.gate", 2, "Router"),
        ("model.layers.0.input_layernorm", 1, ""),
        ("vision_tower.patch_embed.proj", 4, ""),
    ],
)
def test_a_class_is_told_from_name_and_shape(name: str, num_dims: int, kind: str) -> None:
    assert module_kind(name, num_dims) == kind
