"""docs/options.md names every option of the original command, and only keys that exist."""

import dataclasses
import re
from pathlib import Path

from trainer.config import RunConfig, override

TEXT = (Path(__file__).parents[2] / "docs/options.md").read_text()
ORIGINAL = """
ref_num_nodes ref_num_gpus_per_node remote_rm_url actor_num_nodes actor_num_gpus_per_node vllm_num_engines
vllm_tensor_parallel_size vllm_enable_sleep vllm_sync_backend vllm_gpu_memory_utilization
colocate_all_models enable_prefix_caching pretrain save_path micro_train_batch_size train_batch_size
micro_rollout_batch_size rollout_batch_size temperature n_samples_per_prompt max_epochs num_episodes
prompt_max_len max_samples generate_max_len advantage_estimator use_kl_loss kl_estimator init_kl_coef bf16
actor_learning_rate prompt_data input_key normalize_reward zero_stage flash_attn lambd gamma
gradient_checkpointing save_steps max_ckpt_num ckpt_path save_hf_ckpt load_checkpoint use_wandb
"""


def keys() -> set[str]:
    config = RunConfig()
    sections = [
        f.name for f in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, f.name))
    ]
    return {f"{s}.{f.name}" for s in sections for f in dataclasses.fields(getattr(config, s))}


def test_every_option_of_the_original_is_in_the_table():
    rows = [line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| ")]
    named = {option for cell in rows for option in re.findall(r"--([a-z0-9_]+)", cell)}
    assert set(ORIGINAL.split()) - named == set()


def test_every_key_of_the_table_exists_and_takes_the_value_it_shows():
    cells = [
        line.split(" | ")[1] for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line
    ]
    named = {}
    for text in re.findall(r"`([a-z]+\.[a-z_]+(?:: [^`]+)?)`", " ".join(cells)):
        key, _, value = text.partition(": ")
        named.setdefault(key, value)
    assert set(named) - keys() == set() and len(named) > 40
    shown = [f"{key}={value}" for key, value in named.items() if value]
    override(RunConfig(), shown)


def test_keys_named_in_the_text_exist():
    sections = {key.split(".")[0] for key in keys()}
    named = {k for k in re.findall(r"`([a-z]+\.[a-z_]+)", TEXT) if k.split(".")[0] in sections}
    assert named - keys() == set()


def test_every_table_row_has_three_cells():
    for line in TEXT.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 4, line
