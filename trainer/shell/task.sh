# What every task does on its node, whatever the platform, from the repository's root. Rendered files call it in their
# set-up and in their run:
#   . trainer/shell/task.sh begin BUCKET KEPT [LIMITS]
#                      checks and folders; BUCKET: the file's own, "asked": given at launch, "": none; LIMITS: lost machines
#                      and failures that the run's record allows, where a set-up that ends with 35 counts among them
#   must COMMAND ...                      runs a command; write FILE: writes what comes in. Both leave with a project's code
#   step RESULT PYTHON ...                runs a command unless RESULT is there; prepared data come from the bucket
#   await RESULT                          waits for what another job prepares
#   needed ENVIRONMENT RUN                a machine that samples leaves with 0 where its run is over
#   keep PYTHON NAME...                   data that were prepared here go into the bucket, beside the run
set -euo pipefail

end() { # one line, and the code that no platform starts a run again after
  echo "error: $1" >&2
  exit 2
}

leave() { # with the code of what has failed, as one of the project's codes (trainer/system/exit_codes.py)
  case "$1" in
    143) exit 33 ;;
    35) [ -z "${SPOTRL_LIMITS:-}" ] || bash trainer/shell/counted.sh 35 "$2 ended with 35" || exit "$?" ;;
  esac
  case "$1" in
    1 | 2 | 3[3-9] | 130) exit "$1" ;;
  esac
  echo "error: $2 ended with $1" >&2
  exit 1
}

must() {
  [[ "$1" != .venvs/* ]] || [ -x "$1" ] || end "the environment $1 is not here: run the file whole (\`sky launch\`, not \`sky exec\`), with its set-up"
  "$@" || leave "$?" "$1 ${3:-}"
}

write() { cat >"$1" || { echo "error: $1 cannot be written: the disk is full, read-only or failing" >&2; leave 35 "writing $1"; }; }

begin() {
  local own="$1" kept="$2" name
  export SPOTRL_LIMITS="${3:-}"
  [ -n "${RUN_ID:-}" ] || end "the id of the run is missing: give RUN_ID"
  if [ "$own" = asked ]; then
    [ -n "${BUCKET:-}" ] || end "the bucket that checkpoints are pushed to is missing: give BUCKET=s3://..., gs://... or r2://..."
  else
    : "${BUCKET:=$own}"
    [ -z "$own" ] || [ "${BUCKET%/}" = "$own" ] || end "this file was written for the bucket $own: write one for $BUCKET"
  fi
  [ -z "$BUCKET" ] || bash trainer/shell/bucket.sh "$BUCKET" "$kept" || leave "$?" "the check of BUCKET"
  BUCKET="${BUCKET%/}"
  export RUN_ID BUCKET WORK DATA="${DATA:-$WORK/data}" MODELS="${MODELS:-$WORK/models}" RUNS="${RUNS:-$WORK/runs}"
  export HF_HOME="${HF_HOME:-$WORK/huggingface}"
  for name in HF_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY \
    AWS_SESSION_TOKEN R2_ACCESS_KEY_ID R2_SECRET_ACCESS_KEY GOOGLE_SERVICE_ACCOUNT_KEY \
    SPOTRL_REWARD_TOKEN SPOTRL_JUDGE_KEY SPOTRL_FLEET_KEY AWS_ENDPOINT_URL AWS_REGION R2_ACCOUNT_ID; do # a platform that was given none sets them empty, which a store's client takes for a key
    [ -n "${!name:-}" ] || unset "$name"
  done
  mkdir -p "$WORK" .cache || end "the folders $WORK and $PWD/.cache cannot be made"
  write .cache/room <<<"A full disk ends a start here."
}

needed() { # before anything large is there; where the store does not tell, the machine goes on
  local python over=""
  [ -n "$BUCKET" ] || return 0
  for python in ".venvs/$1" "${SPOTRL_IMAGE_DIR:-/opt/spotrl}/.venvs/$1" .venvs/desk; do
    if [ -x "$python/bin/python" ]; then break; fi
  done
  [ -x "$python/bin/python" ] || bash trainer/shell/setup.sh desk || return 0
  over="$("$python/bin/python" -m trainer.checkpoint "$BUCKET" "$2")" || return 0
  [ -z "$over" ] || { echo "nothing to sample for $2: $over"; exit 0; }
}

missing() { # whether a step's result is not there; data at a URL is read where it is
  case "$1" in
    *://*) return 1 ;;
    *) [ ! -e "$1" ] ;;
  esac
}

fetch() { # $1: Python, $2: name of prepared data, which come from the bucket if they are there
  [ -n "$BUCKET" ] && rm -rf "$DATA/.$2" && "$1" -m trainer.storage cp "$BUCKET/data/$2" "$DATA/.$2" 2>/dev/null \
    && [ -e "$DATA/.$2/manifest.json" ] && rm -rf "${DATA:?}/$2" && mv "$DATA/.$2" "$DATA/$2"
}

step() {
  local result="$1" name=""
  shift
  missing "$result" || return 0
  case "$result" in
    "$DATA"/*) name="${result#"$DATA"/}" name="${name%%/*}" ;;
  esac
  if [ -z "$name" ]; then
    must "$@"
  elif ! fetch "$1" "$name"; then
    must "$@"
    touch ".cache/made-$name"
  fi
}

await() { # on a file system that the run's own job shares and prepares on: two that prepare would disturb each other
  local result="$1" left="${SPOTRL_AWAIT_S:-3600}"
  while missing "$result"; do
    [ "$left" -gt 0 ] || end "$result is not there: the run's own job prepares it, start that first"
    sleep 5
    left=$((left - 5))
  done
}

keep() { # by the head alone, while training begins: the next machine takes them from there
  local python="$1" name
  shift
  [ "${SKYPILOT_NODE_RANK:-${DSTACK_NODE_RANK:-${SPOTRL_NODE_RANK:-0}}}" = 0 ] || return 0
  for name in "$@"; do
    [ ! -e ".cache/made-$name" ] || { "$python" -m trainer.storage send "$DATA/$name" "$BUCKET/data/$name" \
      && rm ".cache/made-$name"; } &
  done
}

if [ "${1:-}" = begin ]; then begin "$2" "$3" "${4:-}"; fi
