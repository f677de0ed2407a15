"""The typed configuration of one run. `from trainer.config import RunConfig`; standard library and PyYAML
only.

Lives here: frozen dataclasses with every option documented under itself, overrides, checks; names of a
run's files and folders.
In: YAML and `section.key=value`. Out: a RunConfig, or ConfigError with the change to make.
May import: `trainer.hardware` and `trainer.system`; `recipes` imports this room.
"""

from trainer.config.algorithm import Algorithm as Algorithm
from trainer.config.expected import Band as Band
from trainer.config.expected import Expected as Expected
from trainer.config.files import by_model as by_model
from trainer.config.files import checkpoint_holds_policy as checkpoint_holds_policy
from trainer.config.files import checkpoint_suffices as checkpoint_suffices
from trainer.config.files import dump as dump
from trainer.config.files import load as load
from trainer.config.files import nodes_share_weights as nodes_share_weights
from trainer.config.files import of_teacher as of_teacher
from trainer.config.lora import LoRA as LoRA
from trainer.config.overrides import from_dict as from_dict
from trainer.config.overrides import override as override
from trainer.config.overrides import to_dict as to_dict
from trainer.config.overrides import unknown_key as unknown_key
from trainer.config.resume import RESUME_IGNORES as RESUME_IGNORES
from trainer.config.resume import difference as difference
from trainer.config.resume import fingerprint as fingerprint
from trainer.config.resume import resume_view as resume_view
from trainer.config.rewards import RewardFunction as RewardFunction
from trainer.config.rewards import Rewards as Rewards
from trainer.config.schema import SFT as SFT
from trainer.config.schema import Checkpoint as Checkpoint
from trainer.config.schema import Data as Data
from trainer.config.schema import Evaluation as Evaluation
from trainer.config.schema import Fleet as Fleet
from trainer.config.schema import Logging as Logging
from trainer.config.schema import Model as Model
from trainer.config.schema import Optimizer as Optimizer
from trainer.config.schema import Placement as Placement
from trainer.config.schema import Rollout as Rollout
from trainer.config.schema import Run as Run
from trainer.config.schema import RunConfig as RunConfig
from trainer.config.schema import Split as Split
from trainer.config.turns import Turns as Turns
from trainer.config.validation import validate as validate
from trainer.config.validation import validate_saving as validate_saving
from trainer.config.watching import Guards as Guards
from trainer.config.watching import Watch as Watch
from trainer.system.errors import ConfigError as ConfigError
