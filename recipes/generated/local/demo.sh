#!/usr/bin/env bash
# demo on this machine: RUN_ID=... bash FILE, or `launch.py up demo --target local`.
set -euo pipefail
export WORK="${WORK:-$PWD/.cache}"
export RUNS="${RUNS:-$PWD/runs}"
. trainer/task.sh begin '' "/"
bash trainer/setup.sh cpu
step "${DATA}/shapes-74709ef5/manifest.json" .venvs/cpu/bin/python -m examples.demo.shapes --out "${DATA}/shapes-74709ef5"
step "${MODELS}/demo-0ef25988/config.json" .venvs/cpu/bin/python -m examples.demo.warm_start --data "${DATA}/shapes-74709ef5" --out "${MODELS}/demo-0ef25988"
cat > ".cache/$RUN_ID.yaml" <<YAML
method: grpo
run:
  name: demo
  id: "${RUN_ID}"
  dir: "${RUNS}/${RUN_ID}"
  max_steps: 60
model:
  path: "${MODELS}/demo-0ef25988"
  dtype: fp32
  gradient_checkpointing: false
  min_pixels: 784
data:
  path: "${DATA}/shapes-74709ef5"
  prompt_max_tokens: 512
  image_cache_gib: 0.1
rollout:
  prompts_per_step: 32
  samples_per_prompt: 8
  max_tokens: 32
  kv_cache_gib: 0.5
  sleep_level: 0
  eager: true
algorithm:
  kl_coef: 0.02
optimizer:
  learning_rate: 0.0003
  warmup_steps: 5
  schedule: linear
evaluation:
  every_steps: 10
  max_samples: 128
  temperature: 1.0
  samples_per_prompt: 4
checkpoint:
  every_steps: 5
  remote: "${BUCKET}"
placement:
  workers_per_node: 2
  device: cpu
YAML
.venvs/cpu/bin/python -m recipes.manifest ".cache/$RUN_ID.yaml"
exec .venvs/cpu/bin/python -m trainer.node --config ".cache/$RUN_ID.yaml"
