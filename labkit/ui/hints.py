"""One line for each control: what this switch should do to which curve. Data alone, read by the panel.

Keys are those of Recipe and Experiment, which is also what an override or a YAML file calls them. "Mismatch" is TMPE
and generation KL together: how far the engine's log-probs g and the trainer's p of the same tokens are apart. Where
a switch moves no curve at the size of the tiny policy, the line says so.
"""

HINTS = {
    "preset": "A recipe by name. Keep a bf16 run in the plot: it is the control for every other.",
    "rollout.linears": "FP8 linears in the engine alone: TMPE and KL rise. With the same FP8 in fprop they fall again.",
    "rollout.kv_cache": "FP8 keys and values: TMPE and KL rise. What the scale can't hold is clipped: KV saturation.",
    "rollout.attention": "Q and P in FP8 as well, on top of the cache: TMPE and KL rise a little more.",
    "train.fprop": "FP8 forward of the training. With FP8 linears in the rollout both round alike: TMPE falls.",
    "train.dgrad": "FP8 gradient of the inputs. It makes no mismatch: look at the gradient norm.",
    "train.wgrad": "FP8 gradient of the weights. It makes no mismatch: look at the gradient norm and at accuracy.",
    "keep_bf16.lm_head": "Unticked, the output projection is FP8 too and its rounding goes straight into g: KL rises.",
    "keep_bf16.first_layers": "So many first layers stay BF16 on both sides: TMPE and KL fall, and so does the saving.",
    "keep_bf16.last_layers": "So many last layers stay BF16 on both sides: TMPE and KL fall, and so does the saving.",
    "scaling.format": "E4M3 reaches 448 with 3 bits of mantissa, E5M2 57344 with 2: about twice the error, more TMPE.",
    "scaling.grad_format": "Output gradients, for dgrad and wgrad. E5M2 holds smaller ones with a bit less precision.",
    "scaling.kv_format": "E5M2 is coarser, so KL rises; under unit scales it saturates later: KV saturation falls.",
    "scaling.granularity": "Who shares a scale. tensor depends on the batch: TMPE stays up with FP8 on both sides.",
    "scaling.scale": "Powers of two are exact in BF16, fp32 scales fill the range. On this size hardly a curve moves.",
    "scaling.formula": "Whose rule turns an amax into a scale. They differ in last bits: hardly a curve moves.",
    "recalibration.policy": "When scales are made anew. unit is harmless until keys pass 448: KV saturation, then ESS.",
    "recalibration.every": "Steps between recalibrations: less time in a step, older scales. Watch KV saturation.",
    "recalibration.margin": "Room above the amax seen. More is free; at 0.5 values are clipped and ESS collapses.",
    "correction.project": "Lists a project's corrections. Nothing changes until one is chosen below.",
    "correction.name": "What the loss does about r = exp(p - g): watch ESS, effective batch and held-out accuracy.",
    "correction.floor": "Weights below it are raised to it. Nearer 1: ESS rises, and so does the bias.",
    "correction.cap": "Weights above it are cut to it. Nearer 1: ESS rises, and so does the bias.",
    "correction.low": "What is below it is dropped. A tighter window: the effective batch shrinks.",
    "correction.high": "What is above it is dropped. A tighter window: the effective batch shrinks.",
    "model": "tiny learns in minutes on a CPU; or smollm2, or a Hugging Face folder. Steps, lr and batch follow.",
    "task": "Prompts with rewards that can be checked. Empty: the model's own task.",
    "engine": "What samples the rollouts. Badges say whether its FP8 is native or emulated.",
    "trainer": "What computes p and the update. Badges say whether its FP8 is native or emulated.",
    "trainer_attention": "math: the engine's own arithmetic. sdpa: another kernel, so TMPE isn't exactly 1 in BF16.",
    "seed": "Order of the data and sampling. Held-out differences below 0.08 mean little with one seed.",
    "steps": "Length of the run. Press Stop at any time: what was computed stays.",
    "grpo.lr": "Larger: faster, then unstable. Too small, and FP8 weights don't move: codes changed is 0.",
    "grpo.prompts_per_step": "Times the group: answers in a step. More: slower steps, smoother curves.",
    "grpo.group_size": "Answers to one prompt, judged against their mean. More: better advantages, slower steps.",
    "grpo.minibatches": "Optimizer steps on one batch. The later ones are off-policy: PPO's clip begins to act.",
    "grpo.staleness": "Steps by which the weights that sample are behind: TMPE rises without any FP8, ESS falls.",
    "sampling.temperature": "Of engine and trainer alike. Lower: entropy falls, and there is less to learn from.",
    "eval_every": "Steps between held-out evaluations, sampled in BF16.",
    "checkpoint_every": "Steps between checkpoints, from which a run can be forked. 0: only at the end.",
}
