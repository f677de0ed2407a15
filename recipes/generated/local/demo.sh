#!/usr/bin/env bash
# demo on this machine: RUN_ID=... bash FILE, or `launch.py up demo --target local`.
set -euo pipefail
: "${RUN_ID:?the id of the run is missing: give RUN_ID}"
: "${BUCKET:=}"
[ -z "$BUCKET" ] || bash trainer/bucket.sh "$BUCKET" "/"
BUCKET="${BUCKET%/}"
export WORK="${WORK:-$PWD/.cache}"
export DATA="${DATA:-$WORK/data}" MODELS="${MODELS:-$WORK/models}" RUNS="${RUNS:-$PWD/runs}"
export HF_HOME="${HF_HOME:-$WORK/huggingface}"
for name in HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN R2_ACCESS_KEY_ID R2_SECRET_ACCESS_KEY GOOGLE_SERVICE_ACCOUNT_KEY AWS_ENDPOINT_URL AWS_REGION R2_ACCOUNT_ID; do [ -n "${!name:-}" ] || unset "$name"; done
export RUN_ID BUCKET
mkdir -p "$WORK" .cache
bash trainer/setup.sh cpu
missing() { case "$1" in *://*) return 1 ;; *) [ ! -e "$1" ] ;; esac; }
fetch() { # prepared data from the bucket, if it is there
  [ -n "$BUCKET" ] && rm -rf "$DATA/.$1" && .venvs/cpu/bin/python -m trainer.storage cp "$BUCKET/data/$1" "$DATA/.$1" 2>/dev/null \
    && [ -e "$DATA/.$1/manifest.json" ] && mv "$DATA/.$1" "$DATA/$1"
}
if missing "${DATA}/shapes-c160a3ba/manifest.json"; then fetch shapes-c160a3ba || { .venvs/cpu/bin/python -m examples.demo.shapes --out "${DATA}/shapes-c160a3ba"; touch ".cache/made-shapes-c160a3ba"; }; fi
if missing "${MODELS}/demo-16c1ecff/config.json"; then .venvs/cpu/bin/python -m examples.demo.warm_start --data "${DATA}/shapes-c160a3ba" --out "${MODELS}/demo-16c1ecff"; fi
cat > ".cache/$RUN_ID.yaml" <<YAML
method: grpo
run:
  name: demo
  id: "${RUN_ID}"
  dir: "${RUNS}/${RUN_ID}"
  max_steps: 60
model:
  path: "${MODELS}/demo-16c1ecff"
  dtype: fp32
  gradient_checkpointing: false
  min_pixels: 784
data:
  path: "${DATA}/shapes-c160a3ba"
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
