# `bash trainer/shell/counted.sh CODE WHY`: counts a set-up that ended with CODE in the run's record, and leaves with CODE, or with
# 38 where the record's limits are reached: a platform starts again after CODE without limit. SPOTRL_LIMITS: those limits
# (trainer/shell/task.sh); a machine without them counts nothing, nor does any but the head, nor one whose package index is away
# before it has a client for the store.
code="$1"
read -r losses restarts <<<"${SPOTRL_LIMITS:-}"
head="${SKYPILOT_NODE_RANK:-${DSTACK_NODE_RANK:-${SPOTRL_NODE_RANK:-0}}}"
if [ -z "${BUCKET:-}" ] || [ -z "${RUN_ID:-}" ] || [ -z "$restarts" ] || [ "$head" != 0 ]; then exit "$code"; fi
for name in gpu cpu rocm desk; do
  if [ -x ".venvs/$name/bin/python" ] && .venvs/$name/bin/python -c "import obstore, yaml" 2>/dev/null; then break; fi
done
if [ "$name" = desk ]; then SPOTRL_LIMITS="" SPOTRL_SETUP_PATIENCE_S=0 bash trainer/shell/setup.sh desk || exit "$code"; fi
".venvs/$name/bin/python" -m trainer.node.preflight.refused "$losses" "$restarts" "$code" "$2"
counted="$?"
case "$counted" in 2 | "$code" | 38) exit "$counted" ;; *) exit "$code" ;; esac
