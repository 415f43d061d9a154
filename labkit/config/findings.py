"""What each fault of the gallery did here: tiny policy, seed 0, the settings of its case, one run of each arm.

Held-out accuracies of 4 to 40 steps have a standard error of about .03. "Control" is the same run without the fault.
"""

FINDINGS = {
    "scales-dropped": (
        "no visible effect on the answers: the tiny policy has QK-norm, its keys stay far below 448; gen "
        "KL 1e-4 to 2e-4 in both arms. Only the scales themselves tell, and the alarm that reads them."
    ),
    "scales-stale-growth": (
        "4.5 % of keys and values clipped, TMPE 1.003 → 80 to 1300, gen KL 7e-5 → .04 to .24, rollout "
        "accuracy .41 → .30 after 6 steps; ESS stays at .96 with TIS; held-out accuracy .44 against .49 "
        "(standard error .04)."
    ),
    "scales-from-dummy": (
        "4.7 % of values and .5 % of keys clipped; gen KL 1e-4 → 3e-3 to 2e-2, TMPE up to 4.2 on single "
        "tokens; accuracy unchanged in 4 steps."
    ),
    "scales-frozen": (
        "no visible effect: after 20 steps at lr 4e-4 5e-5 of the values are clipped, gen KL and held-out"
        " accuracy (.86 against .85) are equal."
    ),
    "unit-scale-large-k": (
        "keys 256 times as large: 12 % clipped, TMPE 1.003 → 18 to 67, gen KL 1e-4 → .04 to .10; "
        "calibration takes them in (TMPE 1.003)."
    ),
    "wrong-temperature": (
        "mismatch is exactly 0. Rollout accuracy .65 where the policy has .31 (held-out); surprisal 47 % "
        "below the entropy gives it away."
    ),
    "temperature-forgotten": (
        "TMPE 1.05, gen KL .012 to .021, ESS of the raw weights .91 → .81; mean r stays at .99 to 1.00 "
        "(the ratios are true ones); surprisal 47 % below the entropy."
    ),
    "raw-logprobs": (
        "mean r 1.03 with a standard error of .002; all weights biased upwards; held-out accuracy after 4 steps equal."
    ),
    "logprobs-divided": (
        "mean r 1.14, no single r below 1, 2 % of the weights at their cap; gradient norm 1.6 times as large."
    ),
    "top-p-unnormalised": "mean r .972, every step; held-out accuracy after 4 steps equal (.66, .63).",
    "logprobs-shifted": (
        "TMPE 3 to 52, correlation of the probabilities .19 to .26, raw ESS .001 to .08; TIS hides it: "
        "ESS .90, accuracy as in the control."
    ),
    "nan-logprobs": "2 % of the tokens left out and counted, everything else as in the control.",
    "logprobs-missing": (
        "every mismatch metric exactly 0 (control: TMPE 1.003, 93 % of tokens differ); accuracy as in the control."
    ),
    "layer-not-refitted": (
        "from step 2 on g and p differ on 76 to 99 % of the tokens (control 0); TMPE − 1 grows from .001 "
        "to .02, held-out accuracy equal after 12 steps (.68, .66)."
    ),
    "one-version-behind": (
        "mismatch in every second step: TMPE 1.002 to 1.012, then 1 again; the version in the record is right."
    ),
    "stale-prefix-cache": (
        "g and p differ on 76 to 97 % of the tokens from step 2 on, TMPE − 1 grows from .0005 to .01; accuracy equal."
    ),
    "stale-uncorrected": (
        "held-out accuracy after 40 steps .15 without correction, .96 with TIS (other seeds .64 and .65 "
        "against .82 and .84); the failure begins near step 20, so shorter runs don't show it."
    ),
    "fp8-not-installed": "bit for bit the BF16 run under an FP8 name; mismatch 0.",
    "identity-scale": (
        "rollout accuracy .45 → .01, TMPE 6e5, ESS .17: the answers are noise. Held-out accuracy does not"
        " move in 4 steps (.31)."
    ),
    "weight-scales-stale": (
        "nothing until an amax moves (step 5 here), then g and p differ on 90 % of the tokens with gen KL 4e-5."
    ),
    "zero-block": "the run ends in step 1: the engine refuses to sample from NaN logits.",
    "scale-type-mismatch": (
        "unified FP8 is lost: g and p differ on 93 % of the tokens (control 0), gen KL 1e-4, as much as "
        "FP8 in the rollout alone."
    ),
    "kernels-differ": (
        "g and p differ on 91 % of the tokens (control 0), gen KL 5e-5: most of the FP8 mismatch is back;"
        " accuracy equal."
    ),
    "tensor-scales": "g and p differ on 34 to 68 % of the tokens (control 0), gen KL 3e-6 to 2e-5.",
    "lm-head-fp8": (
        "hardly visible: TMPE 1.003 → 1.004, gen KL 8e-5 → 1.3e-4; on SmolLM2 the head weighs as much as "
        "all other linears."
    ),
    "update-masking": "a refit changes 6e-4 of the codes (control .07 to .10); the policy stands still.",
    "sequence-product": "35 to 45 % of the tokens kept, ESS .29 to .42 (token TIS: all, .98) at answers of 24 tokens.",
    "window-too-tight": "7 to 14 % of the tokens kept; gradient norm a tenth of the control's.",
    "minibatches-uncorrected": (
        "held-out accuracy after 20 steps .16 / .89 / .13 (seeds 0, 1, 2), with PPO's ratio and clip .89 / .91 / .93."
    ),
    "answers-truncated": (
        "48 → 26 % of the answers cut off; the policy learns to answer at once (9 → 6 tokens) and ends at"
        " .15 held-out (under the same limit) against .46."
    ),
}
