# Sourced before anything is downloaded: `. trainer/shell/driver.sh CODE [LOSSES]`. Asks CUDA's own driver, in a second or two, whether it
# runs the CUDA of the locked environment. An older one (RunPod's hosts are not filtered by driver) gets NVIDIA's
# forward-compatibility libraries where the image has them and they work (data-center GPUs); else the shell is left with
# CODE, and one line says why. A rented machine (36) is counted in the run's record first, with LOSSES as its limit: else a
# platform that keeps getting such machines would continue for ever. Then the library of InfiniBand is looked for.

cuda_of_driver() { # the driver's CUDA version as 1000 * major + 10 * minor, or what is wrong with it
  timeout 120 python3 trainer/hardware/driver.py --version || echo "the driver does not answer"
}

use_driver() { # $1: the oldest CUDA version that will do
  local wanted="$1" found first compat
  runs() { [[ "$found" =~ ^[0-9]+$ ]] && [ "$found" -ge "$wanted" ]; }
  found="$(cuda_of_driver)" first="$found"
  if runs; then return 0; fi
  for compat in ${SPOTRL_CUDA_COMPAT:-/usr/local/cuda/compat /usr/local/cuda-"$((wanted / 1000))"*/compat}; do
    [ -e "$compat/libcuda.so.1" ] || continue
    found="$(LD_LIBRARY_PATH="$compat:${LD_LIBRARY_PATH:-}" cuda_of_driver)"
    if runs; then
      export LD_LIBRARY_PATH="$compat:${LD_LIBRARY_PATH:-}"
      echo "the GPU driver is older than CUDA $((wanted / 1000)): using NVIDIA's forward-compatibility libraries in $compat"
      return 0
    fi
  done
  [[ ! "$first" =~ ^[0-9]+$ ]] || first="its GPU driver is of CUDA $((first / 1000)).$((first % 1000 / 10))"
  echo "error: this machine cannot run the environment: $first, CUDA $((wanted / 1000)) needs driver 580 or newer" >&2
  return 1
}

use_driver "$(sed -n 's/^nvidia-cuda-runtime==\([0-9]*\)\..*/\1000/p' requirements/gpu.txt)" || {
  driver_exit="$1"
  if [ "$driver_exit" -eq 36 ] && [ -n "${BUCKET:-}" ] && bash trainer/shell/setup.sh desk; then
    .venvs/desk/bin/python -m trainer.node.preflight.refused "${2:-10}" || case "$?" in 2) driver_exit=2 ;; 38) driver_exit=38 ;; esac
  fi
  exit "$driver_exit"
}

use_infiniband() { # where several nodes have it, NCCL must find its library: root installs it, anybody else is told the command
  local devices="${SPOTRL_INFINIBAND:-/sys/class/infiniband}" packages="libibverbs1 ibverbs-providers librdmacm1" missing nodes
  nodes="${SPOTRL_NODES:-${SKYPILOT_NUM_NODES:-${DSTACK_NODES_NUM:-${SLURM_JOB_NUM_NODES:-}}}}" # "": a set-up is not told
  if [ "$nodes" = 1 ] || [ "${NCCL_IB_DISABLE:-0}" = 1 ]; then return 0; fi
  missing="$(python3 trainer/hardware/verbs.py "$devices")"
  if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "InfiniBand has no $missing here: installing $packages"
    # shellcheck disable=SC2086
    { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends $packages; } >&2 || true
    missing="$(python3 trainer/hardware/verbs.py "$devices")"
  fi
  if [ -z "$missing" ] || [ -z "$nodes" ]; then return 0; fi
  echo "error: without $missing NCCL trains over TCP, and this machine has InfiniBand: put" \
    "\`apt-get install $packages\` into the image, or set NCCL_IB_DISABLE=1" >&2
  exit 2
}

use_infiniband
