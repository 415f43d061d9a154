from typing import Any

import pytest

from labkit.config import ConfigError, Experiment, preset

LORA = {"lora.rank": 8}


@pytest.mark.parametrize(
    ("recipe", "changes", "line"),
    [
        ("fp8-e2e", {}, "recipe.train.wgrad: the base is frozen under lora, so its weights have no gradient"),
        ("bf16", {"engine": "vllm"}, "engine: adapters are built into local, not vllm; set it to local, or lora.rank"),
        ("bf16", {"trainer": "te", "device": "cuda"}, "trainer: adapters are built into local, not te; set it to"),
        ("bf16", {"lora.targets": ()}, "lora.targets: names no layer to adapt; name some, or set rank to 0"),
        ("bf16", {"lora.rank": -1}, "lora.rank: "),
        ("fp8-e2e-fp32-scales", {"recipe.train.wgrad": False, "faults": ("weight-scales-stale",)},
         "faults: weight-scales-stale can't show while lora.rank is 8; set it to 0"),
    ],
)  # fmt: skip
def test_what_adapters_cannot_be_combined_with_is_refused(recipe: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset(recipe, **(LORA | changes))
    assert str(error.value).startswith(line)


def test_settings_without_a_rank_have_no_effect_and_go_with_it() -> None:
    with pytest.raises(ConfigError, match=r"^lora.rank: 0 trains all weights, so alpha and targets have no effect"):
        preset("bf16", **{"lora.alpha": 8})
    set_ = preset("bf16", **LORA, **{"lora.alpha": 8, "lora.targets": ["q_proj"]})
    assert set_.override({"lora.rank": 0}) == preset("bf16")


def test_a_run_of_adapters_is_called_so() -> None:
    experiment = preset("fp8-frozen-base", **LORA)
    assert experiment.name == "fp8-frozen-base-tiny-lora8-s0"
    assert experiment.override({"lora.rank": 0}).name == "fp8-frozen-base-tiny-s0"
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment
