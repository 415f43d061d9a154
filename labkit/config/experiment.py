"""Experiment: Recipe, model, task, GRPO hyper-parameters, engine, trainer and seed: all that a run needs."""

import math
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from labkit.config import engines, experts, faults, lora, own
from labkit.config.cluster import Cluster
from labkit.config.errors import ConfigError, did_you_mean, wrong
from labkit.config.locations import model_folder
from labkit.config.lora import Lora
from labkit.config.own import EngineName
from labkit.config.recipe import Recipe
from labkit.config.settings import Float, Int, Name, Settings

# The models known by name, each with the task it was chosen for.
MODEL_TASKS = {"tiny": "arithmetic", "tiny-moe": "arithmetic", "smollm2": "sums"}
CHARACTER_MODELS = ("tiny", "tiny-moe")  # they read digits and operators only
TASKS, TASK_FAMILIES = own.KINDS["task"].built_in, own.KINDS["task"].families
TASK_FORMS = "arithmetic, sums, gsm8k, reasoning-gym:NAME, dataset:PATH_OR_HUB_NAME, path/to/file.py:NAME"


class Sampling(Settings):
    temperature: Float = Field(default=1.0, ge=1e-4)
    top_p: Float = Field(default=1.0, ge=1e-6, le=1)
    top_k: Int = Field(default=0, ge=0)  # 0: off
    max_new_tokens: Int | None = Field(default=None, ge=1)  # None: the task's own


Beta = Annotated[Float, Field(ge=0, lt=1)]


class GRPO(Settings):
    """One step: prompts_per_step · group_size rollouts, then `minibatches` optimizer updates on them."""

    prompts_per_step: Int = Field(default=16, ge=1, le=100_000)
    group_size: Int = Field(default=8, ge=1, le=100_000)
    minibatches: Int = Field(default=1, ge=1)
    staleness: Int = Field(default=0, ge=0, le=1000)  # steps by which the weights that sample are behind
    micro_batch: Int = Field(default=32, ge=1, le=100_000)  # sequences in one forward
    packing: bool = True
    lr: Float = Field(default=1.5e-4, ge=0, le=1)
    lr_decay: Literal["constant", "linear"] = "constant"
    warmup_steps: Int = Field(default=5, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: Float = Field(default=1.0, gt=0)
    baseline: Literal["group", "leave-one-out"] = "group"
    normalize: bool = True
    clip_low: Float = Field(default=0.2, ge=0, le=1)
    clip_high: Float = Field(default=0.28, ge=0, le=10)
    dual_clip: Float | None = Field(default=None, gt=1)
    kl_coef: Float = Field(default=0.0, ge=0)
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    loss_level: Literal["token", "sequence"] = "token"
    aux_loss_coef: Float = Field(default=0.0, ge=0)  # of the experts' load balancing; NeMo RL too leaves it off

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.group_size < 2:
            why = {
                "group": "a group of one is its own mean, so every advantage would be 0",
                "leave-one-out": "leave-one-out has no other rollout to compare with",
            }[self.baseline]
            raise wrong("group_size", f"{why}; set it to at least 2")
        if self.prompts_per_step % self.minibatches:
            divisors = [n for n in range(1, self.prompts_per_step + 1) if self.prompts_per_step % n == 0]
            what = f"{self.minibatches} does not divide prompts_per_step {self.prompts_per_step}"
            raise wrong("minibatches", f"{what}; choose one of {', '.join(map(str, divisors))}")
        return self


def _plain(value: Any, key: str = "") -> Any:
    """A copy of lists and dicts with string keys, down to values that YAML keeps as they are.

    `key`: the dotted place of the value in the task options.
    """
    inside = f"{key}." if key else ""
    match value:
        case dict():
            if bad := [name for name in value if not isinstance(name, str)]:
                raise wrong(f"{inside}{bad[0]}", "is no name of an option; names are text")
            return {name: _plain(inner, inside + name) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, f"{inside}{place}") for place, inner in enumerate(value)]
        case float() if not math.isfinite(value):
            raise wrong(key, f"must be a finite number, got {value!r}")
        case None | bool() | int() | float() | str():
            return value
        case _:
            what = "must be text, a number, true/false or a list or dict of them"
            raise wrong(key, f"{what}, got {type(value).__name__}")


class Experiment(Settings):
    """`name` and `task`, when not given, are filled in, and follow when what they came from is overridden."""

    label: ClassVar[str] = "name"

    name: Name = ""
    recipe: Recipe = Recipe()
    # tiny, tiny-moe, smollm2, OWNER/NAME of the Hugging Face hub, or a folder
    model: Name = Field(default="tiny", min_length=1)
    task: Name = ""
    task_options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(default={})
    grpo: GRPO = GRPO()
    sampling: Sampling = Sampling()
    lora: Lora = Lora()  # rank 0: all weights are trained
    engine: EngineName = "local"
    trainer: Literal["local", "te"] = "local"
    device: Literal["cpu", "cuda"] = "cpu"
    cluster: Cluster = Cluster()
    trainer_attention: Literal["math", "sdpa"] = "math"  # math: the same kernels as the rollout
    steps: Int = Field(default=60, ge=1, le=1_000_000)
    eval_every: Int = Field(default=20, ge=1)
    eval_prompts: Int = Field(default=256, ge=1, le=100_000)
    eval_engine: bool = False  # measure the same problems through an engine of the run's own precision as well
    checkpoint_every: Int = Field(default=0, ge=0)  # 0: only at the end
    keep_rollouts: Int = Field(default=16, ge=0)  # rollouts recorded in each step
    seed: Int = Field(default=0, ge=0, lt=2**32)
    threads: Int | None = Field(default=None, ge=1)
    faults: tuple[Name, ...] = ()  # broken on purpose: labkit.gallery has the names

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.task:
            object.__setattr__(self, "task", self._own_task())
        _check_task(self.task, self.model)
        faults.check(self)
        engines.check(self)
        experts.check(self)
        lora.check(self)
        correction = self.recipe.correction
        if self.grpo.staleness >= self.steps:
            what = f"{self.grpo.staleness} of {self.steps} steps: the engine would never see an update"
            raise wrong("grpo.staleness", f"{what}; choose less than steps")
        if self.grpo.dual_clip is not None and correction.objective not in ("ppo", "gspo"):
            what = f"bounds the clipped ratio of ppo and gspo, {correction.objective} has none"
            raise wrong("grpo.dual_clip", f"{what}; drop it or change recipe.correction")
        if not self.name:
            object.__setattr__(self, "name", self._own_name())
        return self

    @property
    def same_kernels(self) -> bool:
        """Whether trainer and engine may compute the same bits: this package's own arithmetic on both sides."""
        own = (self.engine, self.trainer, self.device) == ("local", "local", "cpu")
        return own and self.trainer_attention == "math"

    def short_str(self) -> str:
        """One line: the recipe's, and whether adapters are trained."""
        return f"{self.recipe.short_str()} {self.lora.short_str()}".rstrip()

    def _own_task(self) -> str:
        if self.model in MODEL_TASKS:
            return MODEL_TASKS[self.model]
        try:
            model_folder(self.model)
        except ConfigError as error:  # no model, so no task is missing yet
            key, _, what = error.problems[0].partition(": ")
            hint = did_you_mean(self.model, MODEL_TASKS, otherwise="")
            raise wrong(key, f"{what}; {hint}" if hint.startswith("did") else what) from None
        raise wrong("task", f"model {self.model} has none of its own; choose one of {TASK_FORMS}")

    def _own_name(self) -> str:
        parts = [self.recipe.name, PurePath(self.model).name or self.model, self.lora.short_str(), f"s{self.seed}"]
        return "-".join(filter(None, parts))

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        changes = dict(changes)
        if self.name == self._own_name():
            changes.setdefault("name", "")
        if changes.get("model", self.model) != self.model and self.task == MODEL_TASKS.get(self.model):
            changes.setdefault("task", "")
        if changes.get("task", self.task) != self.task:
            changes["task_options"] = dict(changes.get("task_options", {}))
        return super()._merged(changes)


def _check_task(task: str, model: str) -> None:
    family, colon, name = task.partition(":")
    if own.KINDS["task"].owns(task) and (own.is_reference(task) or task in own.installed("task")):
        return
    if family in TASK_FAMILIES:
        if not name.strip():
            raise wrong("task", f"{family} needs a name: write {family}:NAME")
    elif colon or task not in TASKS:
        hint = did_you_mean(family, (*TASKS, *TASK_FAMILIES), otherwise="")
        raise wrong("task", f"no task {task!r}; {hint if hint.startswith('did') else f'choose one of {TASK_FORMS}'}")
    if model in CHARACTER_MODELS and (task in ("sums", "gsm8k") or family == "reasoning-gym"):
        what = f"{task} is written in letters or lines, which the {model} model can't read"
        raise wrong("task", f"{what}; choose arithmetic, or model smollm2")
