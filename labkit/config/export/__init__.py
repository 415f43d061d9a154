"""An Experiment as the configuration of NeMo RL, verl or TRL, for taking a recipe from here to a cluster.

    text, notes = nemo_rl(experiment)      YAML for examples/run_grpo.py --config
    text, notes = verl(experiment)         YAML for verl.trainer.main_ppo --config-name
    text, notes = trl(experiment)          Python: a GRPOConfig

`notes` names every setting that has no counterpart there, or one that means something else; the same lines stand as
comments at the head of the text, so that a copied file keeps them. What depends on the cluster (parallelism, memory,
micro-batches, checkpoints, logging) is left to the other framework's own defaults.

A correction is translated by its composition, not by its name, so a custom one is translated too. It goes over whole
or not at all: half of one would be another method.

Sources, as of August 2026: NeMo RL grpo_math_1B.yaml and ClippedPGLossConfig; verl ppo_megatron_trainer.yaml,
RolloutCorrectionConfig and docs/low_precision/fp8.md; TRL GRPOConfig.
"""

from labkit.config.export.common import Exported
from labkit.config.export.nemo_rl_config import nemo_rl
from labkit.config.export.trl_config import trl
from labkit.config.export.verl_config import verl

__all__ = ["Exported", "nemo_rl", "trl", "verl"]
