"""What engine, trainer, device and cluster can't do together, each with the way out. Whether the packages are
installed is another question, which `labkit.hardware.packages` answers for the machine at hand.
"""

from typing import TYPE_CHECKING

from labkit.config.errors import wrong
from labkit.config.own import KINDS

if TYPE_CHECKING:
    from labkit.config.experiment import Experiment
    from labkit.config.recipe import Recipe


def check(experiment: "Experiment") -> None:
    if KINDS["scaling"].owns(experiment.recipe.scaling.formula):
        _check_own_scaling(experiment)
    if experiment.engine == "vllm":
        _check_vllm(experiment)
    if experiment.trainer == "te":
        _check_te(experiment)
    if experiment.faults:
        _check_faults(experiment)
    if experiment.eval_engine and (experiment.engine != "local" or experiment.cluster.placement != "process"):
        what = "needs a second engine, which only the local one in this process can be"
        raise wrong("eval_engine", f"{what}; set it to false, or engine to local and cluster.placement to process")
    if experiment.cluster.overlap and not experiment.grpo.staleness:
        what = "the next batch is sampled before this step's weights exist"
        raise wrong("grpo.staleness", f"{what}; set it to at least 1, or cluster.overlap to false")


def _check_own_scaling(experiment: "Experiment") -> None:
    """A rule of the user's needs this package's quantiser on both sides."""
    for key, value, theirs in (("engine", experiment.engine, "vllm"), ("trainer", experiment.trainer, "te")):
        if value == theirs:
            what = f"{value} has rules of its own for scales and doesn't take yours"
            raise wrong("recipe.scaling.formula", f"{what}; choose te, deepgemm or vllm, or set {key} to local")


def _check_vllm(experiment: "Experiment") -> None:
    recipe = experiment.recipe
    if not recipe.keep_bf16.lm_head and recipe.rollout.linears:
        raise wrong("recipe.keep_bf16.lm_head", "vLLM never quantises the lm_head; set it to true, or engine to local")
    if recipe.recalibration.policy == "engine":
        what = "vLLM no longer measures scales itself"
        raise wrong("recipe.recalibration.policy", f"{what}; choose every-step, or engine local")
    if experiment.sampling.temperature < 0.01:
        raise wrong("sampling.temperature", "vLLM raises anything below 0.01 to that; set it to at least 0.01")
    if experiment.device == "cuda":
        _check_vllm_on_cuda(recipe)
    elif recipe.rollout.attention:
        what = "vLLM on a CPU reads the FP8 cache but multiplies in BF16"
        raise wrong("recipe.rollout.attention", f"{what}; turn it off, or set engine to local")


def _check_vllm_on_cuda(recipe: "Recipe") -> None:
    """What its GPU kernels can't do. On a CPU labkit's quantiser stands in for them."""
    rollout, scaling = recipe.rollout, recipe.scaling
    if rollout.kv_cache and not rollout.attention:
        what = "vLLM's attention on a GPU quantises Q and P too where the cache is FP8"
        raise wrong("recipe.rollout.attention", f"{what}; turn it on, or recipe.rollout.kv_cache off")
    if rollout.kv_cache and scaling.kv_format != "e4m3":
        raise wrong("recipe.scaling.kv_format", "vLLM's FP8 attention on a GPU is E4M3 only; set it to e4m3")
    if not rollout.linears:
        return
    if scaling.format != "e4m3":
        raise wrong("recipe.scaling.format", "vLLM's FP8 kernels on a GPU are E4M3 only; set it to e4m3")
    why = {
        "tensor": "vLLM gives the fused q, k, v one scale, the trainer three",
        "mx": "no kernel of vLLM takes MX weights that were quantised here",
    }.get(scaling.granularity)
    if why:
        raise wrong("recipe.scaling.granularity", f"{why}; choose block, row, or engine local")
    if scaling.granularity == "row" and scaling.scale == "pow2":
        what = "vLLM's scale of a token on a GPU is never rounded to a power of 2"
        raise wrong("recipe.scaling.scale", f"{what}; set it to fp32, or granularity to block")


def _check_te(experiment: "Experiment") -> None:
    train, scaling = experiment.recipe.train, experiment.recipe.scaling
    if experiment.device != "cuda":
        raise wrong("device", "Transformer Engine computes on CUDA devices only; set it to cuda, or trainer to local")
    if not any(on for _, on in train):
        return
    if not train.fprop or train.dgrad != train.wgrad:
        what = "Transformer Engine has FP8 for all three GEMMs, or for fprop alone"
        raise wrong("recipe.train", f"{what}; set fprop to true and dgrad and wgrad alike, or trainer to local")
    if scaling.granularity == "row":
        what = "Transformer Engine has no recipe with a scale for each row"
        raise wrong("recipe.scaling.granularity", f"{what}; choose block, tensor or mx, or trainer local")
    if scaling.format != "e4m3":
        what = "Transformer Engine has E5M2 for gradients only"
        raise wrong("recipe.scaling.format", f"{what}; set it to e4m3 (and grad_format to e5m2), or trainer to local")
    if scaling.formula != "te" and experiment.engine != "vllm":  # a vLLM engine has its own, whatever is set
        what = f"Transformer Engine computes scales by its own rule, not {scaling.formula}'s"
        raise wrong("recipe.scaling.formula", f"{what}; set it to te, or trainer to local")


def _check_faults(experiment: "Experiment") -> None:
    """Faults reach into engine and trainer of this package."""
    for key, value, needed in (
        ("engine", experiment.engine, "local"),
        ("trainer", experiment.trainer, "local"),
        ("device", experiment.device, "cpu"),
        ("cluster.placement", experiment.cluster.placement, "process"),
    ):
        if value != needed:
            raise wrong(key, f"faults are built into {needed}, not {value}; set it to {needed}, or drop faults")
