"""Held-out accuracy of the policy itself: sampled in BF16, whatever the rollouts run in.

The reward of the rollouts says how well the *sampler* does. A broken FP8 sampler can be fitted by the policy until
its rewards look healthy while the policy behind it falls, so accuracy is measured without any quantisation, on
problems that are never trained on, with the same random numbers every time. It is sampled on the device that the
weights are on.

`Experiment.eval_engine` measures beside it what the run's own engine makes of the same weights and problems: what would
be deployed. The difference of the two is the price of its quantisation. It takes a second engine, so that what the
run's own one has measured and cached stays as it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.config import Lora, Recipe
from labkit.fp8 import KVScales
from labkit.rollout import Engine, LocalEngine, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from labkit.models import Policy
    from labkit.rl.episodes import Prompter

BATCH = 512  # prompts in one generation: what bounds the memory and the time until a stop is seen


class HeldOut:
    def __init__(
        self,
        policy: "Policy",
        prompter: "Prompter",
        request: Request,
        num_prompts: int,
        on_microstep: "Callable[[], None]",
        lora: Lora | None = None,
    ) -> None:
        self.policy, self.on_microstep, self.lora = policy, on_microstep, lora
        self.engine: LocalEngine | None = None
        self.prompter, self.request = prompter, request
        self.problems = prompter.task.heldout(num_prompts)
        self.prompts = [prompter.encode(problem) for problem in self.problems]
        self.wanted = num_prompts

    def shortage(self) -> list[str]:
        """What to tell the user when the task has fewer held-out problems than asked for."""
        found = len(self.problems)
        return [f"held-out accuracy rests on {found} problems, not {self.wanted}"] if found < self.wanted else []

    def accuracy(self, weights: Mapping[str, Tensor], version: int) -> float:
        device = next(iter(weights.values())).device.type
        if self.engine is None or self.engine.device.type != device:
            pad_id = self.policy.tokenizer.pad_id
            self.engine = LocalEngine(self.policy.config, Recipe(), pad_id, self.on_microstep, device, self.lora)
        return self.through(self.engine, weights, None, version)

    def through(self, engine: Engine, weights: Mapping[str, Tensor], scales: KVScales | None, version: int) -> float:
        """Accuracy of what another engine makes of the same weights; the engine is left with them."""
        engine.refit(weights, scales, version)
        generator = torch.Generator().manual_seed(0)
        right = 0.0
        for start in range(0, len(self.prompts), BATCH):
            rollouts = engine.generate(self.prompts[start : start + BATCH], self.request, generator)
            right += float(self.prompter.score(rollouts, self.problems[start : start + BATCH]).rewards_B.sum())
        return right / len(self.prompts)
