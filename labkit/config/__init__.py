"""Recipes and Experiments: what is to be run, checked before anything runs. Imports no torch."""

from labkit.config.cluster import Cluster
from labkit.config.correction import Correction, Filter
from labkit.config.corrections import CORRECTIONS
from labkit.config.errors import ConfigError
from labkit.config.experiment import GRPO, Experiment, Sampling
from labkit.config.lora import Lora
from labkit.config.overrides import parse_assignments
from labkit.config.presets import DESCRIPTIONS, MODEL_DEFAULTS, RECIPES, preset
from labkit.config.recipe import KeepBF16, Recalibration, Recipe, Rollout, Router, Scaling, Train

__all__ = [
    "CORRECTIONS",
    "DESCRIPTIONS",
    "GRPO",
    "MODEL_DEFAULTS",
    "RECIPES",
    "Cluster",
    "ConfigError",
    "Correction",
    "Experiment",
    "Filter",
    "KeepBF16",
    "Lora",
    "Recalibration",
    "Recipe",
    "Rollout",
    "Router",
    "Sampling",
    "Scaling",
    "Train",
    "parse_assignments",
    "preset",
]
