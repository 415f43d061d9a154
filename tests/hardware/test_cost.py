"""The model against hand-made numbers, its own logic, and figures that others published.

The published figures are bands: no constant was fitted to them. Where the model misses, the test says by how much.
"""

import dataclasses
import io

import pytest
from rich.console import Console

from labkit.config import RECIPES, Recipe
from labkit.hardware import PUBLISHED, Modelled, Workload, modelled
from labkit.hardware import cost as model

# NeMo RL PR #1212 and FP8-RL (2601.18150): Qwen3-8B-Base, DAPO, 32 prompts of 16 answers up to 20k tokens on 8 H100.
# The mean length of an answer is not published; the longest is LONGEST times that of this workload.
LONG = Workload(prompts=32, group=16, prompt_tokens=2048, response_tokens=5000, num_gpus=8)


def of(recipe: str, shape: str = "llama-3.1-8b", device: str = "h100", workload: Workload = PUBLISHED) -> Modelled:
    return modelled(RECIPES[recipe], shape, device, workload)


def long(recipe: str) -> Modelled:
    return of(recipe, "qwen3-8b", workload=LONG)


def faster(recipe: str, control: str, rate: str, shape: str = "qwen3-8b", workload: Workload = LONG) -> float:
    after, before = (getattr(of(name, shape, workload=workload), rate) for name in (recipe, control))
    return after / before


class TestByHand:
    def test_capacity_is_what_memory_leaves_over_bytes_of_a_token(self) -> None:
        room = 0.6 * 80 * 2**30 - 2**30 - 2 * of_params("llama-3.1-8b")
        assert of("bf16").kv_capacity_tokens == int(room / 131072)

    def test_one_rollout_decodes_at_the_speed_of_reading_the_weights(self) -> None:
        alone = modelled(Recipe(), "llama-3.1-8b", "h100", Workload(1, 1, 1, 100, 1))
        read = (2 * (of_params("llama-3.1-8b") - 128256 * 4096)) / (3.35e12 * model.DECODE_BANDWIDTH)  # no embedding
        assert alone.seconds["decode"] == pytest.approx(400 * (read + model.STEP_OVERHEAD), rel=0.005)

    def test_bf16_training_has_the_named_mfu(self) -> None:
        result = modelled(Recipe(), "llama-3.1-8b", "h100", Workload(1, 8, 8, 8, 1))  # short: no attention to speak of
        linear = 6 * 8 * 16 * (of_params("llama-3.1-8b") - 128256 * 4096)
        assert result.seconds["update"] == pytest.approx(linear / (989e12 * model.MFU), rel=1e-3)
        assert result.seconds["score"] == pytest.approx(result.seconds["update"] / 3)

    def test_block_gemms_with_quantisation_gain_what_transformer_engine_measured(self) -> None:
        assert 1 / (1 / (2 * model.FP8_GEMM) + model.QUANTISE["block"]) == pytest.approx(1.41, abs=0.01)
        assert 1 / (1 / (2 * model.FP8_GEMM) + model.QUANTISE["tensor"]) == pytest.approx(1.57, abs=0.01)


def of_params(name: str) -> int:
    return model.shape_named(name).params


class TestWhatChangesWhat:
    def test_each_component_shortens_its_own_phases_only(self) -> None:
        control = of("bf16").seconds
        for recipe, phases in (
            ("fp8-rollout", {"prefill", "decode", "refit"}),
            ("fp8-rollout-kv", {"prefill", "decode", "refit", "recalibrate"}),
            ("fp8-e2e", {"prefill", "decode", "refit", "score", "update"}),
        ):
            assert {phase for phase, s in of(recipe).seconds.items() if s != control[phase]} == phases

    def test_gradients_in_bf16_leave_two_thirds_of_the_update(self) -> None:
        saved = {
            name: of("bf16").seconds["update"] - of(name).seconds["update"] for name in ("fp8-e2e-fprop", "fp8-e2e")
        }
        assert saved["fp8-e2e"] == pytest.approx(3 * saved["fp8-e2e-fprop"])
        assert of("fp8-e2e-fprop").seconds["score"] == of("fp8-e2e").seconds["score"]

    def test_kept_layers_take_their_share_of_the_gain(self) -> None:
        all_of_it = of("bf16").seconds["update"] - of("fp8-e2e").seconds["update"]
        recipe = RECIPES["fp8-e2e"].override({"keep_bf16.first_layers": 4, "keep_bf16.last_layers": 4})
        kept = of("bf16").seconds["update"] - modelled(recipe, workload=PUBLISHED).seconds["update"]
        assert kept == pytest.approx(0.75 * all_of_it)

    def test_an_fp8_lm_head_counts_where_the_forward_reaches_it(self) -> None:
        recipe = RECIPES["fp8-e2e-kv"].override({"keep_bf16.lm_head": False})
        kept, head = of("fp8-e2e-kv").seconds, modelled(recipe, workload=PUBLISHED).seconds
        assert {phase for phase in kept if head[phase] < kept[phase]} == {"decode", "score", "update"}
        assert head["recalibrate"] == kept["recalibrate"]

    def test_recalibration_by_policy(self) -> None:
        def seconds(**changes: object) -> float:
            settings = {f"recalibration.{key}": value for key, value in changes.items()}
            return modelled(RECIPES["fp8-rollout-kv"].override(settings)).seconds["recalibrate"]

        assert seconds(policy="every-k-steps", every=4) == pytest.approx(seconds() / 4)
        assert seconds(policy="unit") == seconds(policy="engine") == seconds(policy="first-step") == 0

    def test_the_correction_costs_nothing(self) -> None:
        assert of("fp8-rollout-tis").seconds == of("fp8-rollout").seconds

    def test_narrow_layers_lose_by_fp8_training(self) -> None:
        workload = Workload(num_gpus=1)
        control = modelled(Recipe(), "qwen3-0.6b", workload=workload).seconds["update"]
        assert modelled(RECIPES["fp8-e2e"], "qwen3-0.6b", workload=workload).seconds["update"] > control

    def test_no_fp8_no_gain(self) -> None:
        assert of("fp8-e2e-kv", device="a100").seconds == of("bf16", device="a100").seconds
        assert of("fp8-e2e-kv", device="a100").notes

    def test_rollouts_wait_for_room_in_the_cache(self) -> None:
        assert long("bf16").concurrency < long("fp8-rollout-kv").concurrency <= 64
        assert of("bf16").concurrency == 128

    def test_more_bandwidth_decodes_faster(self) -> None:
        assert of("bf16", device="h200").rollout > 1.2 * of("bf16").rollout


class TestPublished:
    def test_kv_capacity_of_qwen3_8b(self) -> None:
        """PR #1212: 249,952 tokens in BF16, 299,344 with FP8 linears, 598,672 with an FP8 cache."""
        bf16, linears, kv = (long(name).kv_capacity_tokens for name in ("bf16", "fp8-rollout", "fp8-rollout-kv"))
        assert bf16 == pytest.approx(249_952, rel=0.10)  # 231,153
        assert linears / bf16 == pytest.approx(299_344 / 249_952, abs=0.02)  # 1.204, published 1.198
        assert kv / linears == pytest.approx(2, abs=1e-4)

    def test_step_of_llama_8b(self) -> None:
        """NeMo RL v0.5, 16 H100: 1,581 tok/s/GPU, 92.8 s. The model is 17 % too fast: work off the GPU is left out."""
        result = of("bf16")
        assert 1.10 < result.end_to_end / 1581 < 1.25
        assert 0.80 < result.step_seconds / 92.8 < 0.90

    def test_fp8_linears_end_to_end(self) -> None:
        """+15 to 25 %; NeMo RL's table has 53.0 s for 64.8 s, +23 %, of another mode (rollouts one step off)."""
        assert 1.15 < faster("fp8-e2e", "bf16", "end_to_end", "llama-3.1-8b", PUBLISHED) < 1.25
        assert 1.15 < faster("fp8-e2e", "bf16", "end_to_end") < 1.25

    def test_fp8_linears_in_the_rollout(self) -> None:
        """verl +12 to 18 %, FP8-RL +10 to 20 %, Jet-RL 1.33: the model is above the first two."""
        assert 1.18 < faster("fp8-rollout", "bf16", "rollout") < 1.33

    def test_kv_and_attention_in_the_rollout(self) -> None:
        """+30 % (NeMo RL), +38 % (FP8-RL) over FP8 linears. It hangs on the length of answers, which is not published:
        short ones gain less, and with a mean of 8,000 tokens the model promises more than was seen."""
        assert 1.30 < faster("fp8-rollout-kv", "fp8-rollout", "rollout") < 1.45
        assert faster("fp8-rollout-kv", "fp8-rollout", "rollout", "llama-3.1-8b", PUBLISHED) < 1.15
        longer = dataclasses.replace(LONG, response_tokens=8000)
        assert faster("fp8-rollout-kv", "fp8-rollout", "rollout", workload=longer) == pytest.approx(1.53, abs=0.03)

    def test_everything_together(self) -> None:
        """48 % (NeMo RL), 44 % (FP8-RL)."""
        assert 1.40 < faster("fp8-e2e-kv", "bf16", "end_to_end") < 1.55

    def test_training(self) -> None:
        """1.1 to 1.2 with block scales (2609.22870), about 1.2 (verl); Jet-RL's 1.41 is out of reach."""
        assert 1.10 < faster("fp8-e2e", "bf16", "train") < 1.20

    def test_rollout_share_of_long_answers(self) -> None:
        """About 80 % of an iteration (FP8-RL)."""
        assert long("bf16").rollout_seconds / long("bf16").step_seconds == pytest.approx(0.8, abs=0.05)

    def test_recalibration_is_overestimated(self) -> None:
        """2 to 3 % of a step were measured. A whole forward at the MFU of training is more than twice as much."""
        assert 0.05 < long("fp8-e2e-kv").seconds["recalibrate"] / long("fp8-e2e-kv").step_seconds < 0.09


class TestSaidAloud:
    def test_the_table_says_modelled_with_its_inputs(self) -> None:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        console.print(of("fp8-e2e", device="b200").table())
        text = console.file.getvalue()
        for part in (
            "modelled for B200 HGX, not measured",
            "Llama-3.1-8B",
            "127 + 1,019 tokens",
            "r:lin",
            "scorings",
        ):
            assert part in text
        assert "train.wgrad: no native FP8 block kernel on B200" in " ".join(text.split())

    def test_rates_and_seconds_agree(self) -> None:
        result = of("fp8-e2e-kv")
        assert result.end_to_end == pytest.approx(128 * 1146 / result.step_seconds)
        assert result.rollout == pytest.approx(128 * 1019 / result.rollout_seconds)
        assert result.train == pytest.approx(128 * 1146 / result.seconds["update"])

    def test_a_model_that_does_not_fit_is_refused_with_a_way_out(self) -> None:
        with pytest.raises(ValueError, match="smaller shape, shorter answers or a device with more memory"):
            of("bf16", device="l4")

    @pytest.mark.parametrize(
        ("changes", "match"), [({"group": 0}, "group: must be at least 1"), ({"prompts": 1, "group": 2}, "num_gpus: 2")]
    )
    def test_impossible_workloads_are_refused(self, changes: dict[str, int], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            Workload(**changes)
