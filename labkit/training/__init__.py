"""Trainers: what computes log-probabilities and updates, in the precision the Recipe asks for."""

from labkit.training.build import build_trainer
from labkit.training.local import LocalTrainer
from labkit.training.trainer import Trainer, Update

__all__ = ["LocalTrainer", "Trainer", "Update", "build_trainer"]
