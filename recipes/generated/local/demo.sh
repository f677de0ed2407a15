#!/usr/bin/env bash
# demo on this machine: RUN_ID=... bash FILE, or `python3 launch.py up demo --target local`.
set -euo pipefail
export WORK="${WORK:-$PWD/.cache}"
export RUNS="${RUNS:-$PWD/runs}"
. trainer/shell/task.sh begin '' "/" "10 3"
bash trainer/shell/setup.sh cpu
step "${DATA}/shapes-4d457f0c/manifest.json" .venvs/cpu/bin/python -m examples.demo.shapes --out "${DATA}/shapes-4d457f0c"
step "${MODELS}/demo-ab305cd6/config.json" .venvs/cpu/bin/python -m examples.demo.warm_start --data "${DATA}/shapes-4d457f0c" --out "${MODELS}/demo-ab305cd6"
write ".cache/$RUN_ID.yaml" <<YAML
method: grpo
run:
  name: demo
  id: "${RUN_ID}"
  dir: "${RUNS}/${RUN_ID}"
  max_steps: 60
model:
  path: "${MODELS}/demo-ab305cd6"
  dtype: fp32
  gradient_checkpointing: false
  min_pixels: 784
data:
  path: "${DATA}/shapes-4d457f0c"
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
expected:
  bands:
  - metric: eval/accuracy
    steps:
    - 0
    - 10
    - 20
    - 30
    - 40
    - 50
    - 60
    low:
    - 0.3048
    - 0.5294
    - 0.668
    - 0.6759
    - 0.7013
    - 0.7345
    - 0.7559
    high:
    - 0.4784
    - 0.7929
    - 0.8671
    - 0.953
    - 0.9843
    - 0.9862
    - 0.998
    window: 1
    source: three seeds of the demo on two CPU cores (AMD EPYC)
  - metric: reward/accuracy
    steps:
    - 10
    - 20
    - 30
    - 40
    - 50
    - 60
    low:
    - 0.4738
    - 0.5792
    - 0.6808
    - 0.6769
    - 0.6808
    - 0.7198
    high:
    - 0.745
    - 0.9286
    - 0.9833
    - 1.0145
    - 1.0497
    - 1.0497
    window: 5
    source: three seeds of the demo on two CPU cores (AMD EPYC)
  - metric: tokens/response_mean
    steps:
    - 10
    - 20
    - 30
    - 40
    - 50
    - 60
    low:
    - 15.4023
    - 15.4219
    - 15.1562
    - 15.2891
    - 15.1094
    - 15.0547
    high:
    - 18.6562
    - 18.8008
    - 18.9727
    - 18.7461
    - 18.7031
    - 18.4375
    window: 5
    source: three seeds of the demo on two CPU cores (AMD EPYC)
  not_promised: seconds and memory, which depend on the machine; other processors round otherwise, so their curves are other draws
YAML
must .venvs/cpu/bin/python -m recipes.records.manifest ".cache/$RUN_ID.yaml"
exec .venvs/cpu/bin/python -m trainer.node --config ".cache/$RUN_ID.yaml"
