#!/usr/bin/env bash
# Makes .venvs/NAME from the hashed requirements/NAME.txt: bash trainer/shell/setup.sh cpu|gpu|rocm|test|launch|desk|data
# desk: what talks to an object store and to the hub and nothing else, in a few seconds. data: that, and what prepares data.
# Laptops and nodes run the same file. A second call with the same requirements returns at once.
# SPOTRL_PYTHON=3.12 makes a new one with that Python; default 3.11.
# An environment with a file `.pinned` in it is yours and is left as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ "$#" -gt 0 ] || { echo "which environment? bash trainer/shell/setup.sh cpu|gpu|rocm|test|launch|desk|data" >&2; exit 2; }
name="$1"

# Leaves with one of the project's codes (trainer/system/exit_codes.py), whatever ended it.
trap 'code=$?; case "$code" in 143) exit 33 ;; 0 | 1 | 2 | 3[3-9] | 130) exit "$code" ;; *) exit 1 ;; esac' EXIT
trap 'exit 143' TERM

passing='error sending request|timed? ?out|connection|network|dns|resolve host|name resolution|temporar|unreachable|broken pipe'
passing="$passing|reset by peer|incomplete|unexpected eof|end of file|tls|handshake|too many requests|(status|error|code)[: (]*(408|429|5[0-9][0-9])"
no_room='no space left|os error 28|disk quota exceeded|read-only file system|input/output error'
leave() { # 35, counted in the run's record: why, what to say
    echo "error: $2" >&2
    [ -z "${SPOTRL_LIMITS:-}" ] || bash trainer/shell/counted.sh 35 "$1" || exit "$?"
    exit 35
}
leave_full() { leave "the disk is full" "the disk of $PWD is full, read-only or failing: free some space, or clone on another"; }
free_kib() { df -Pk .venvs | awk 'NR==2 {print $4}'; }
patiently() { # runs what downloads again for minutes while the network or the package index is away; then 35
    local said=".venvs/.$name.said" wait_s=4 until="$((SECONDS + ${SPOTRL_SETUP_PATIENCE_S:-600}))"
    until "$@" 2>"$said"; do
        cat "$said" >&2 || leave_full
        # A full disk also keeps what was said.
        if grep -qiE "$no_room" "$said" || [ "$(free_kib)" -lt 1024 ]; then leave_full; fi
        if ! grep -qiE "$passing" "$said" || grep -qi 'hash mismatch' "$said"; then
            echo "error: environment $name cannot be made in $PWD/.venvs/$name: see the line above" >&2
            exit 2
        fi
        if [ "$((SECONDS + wait_s))" -gt "$until" ]; then
            leave "the package index stays away" \
                "the network or the package index stays away: environment $name could not be downloaded"
        fi
        echo "the network or the package index is away: again in $wait_s s" >&2
        sleep "$wait_s"
        wait_s="$((wait_s < 60 ? 2 * wait_s : 60))"
    done
    cat "$said" >&2
}

case "$name" in
    cpu | gpu | test | launch) lock="requirements/$name.txt" ;;
    rocm | desk | data) lock="requirements/gpu.txt" ;;
    *) echo "unknown environment $name: choose cpu, gpu, rocm, test, launch, desk or data" >&2; exit 2 ;;
esac
processor="$(uname -m 2>/dev/null || echo "$HOSTTYPE")"
[ "$processor" = x86_64 ] ||
    { echo "the environments are locked for x86_64, and this machine is $processor: take one without an ARM processor (GH200 has one)" >&2; exit 2; }
[ -f "$lock" ] || { echo "$lock is missing: check out the whole repository" >&2; exit 2; }

venv=".venvs/$name"
stamp="$(cat "$lock" trainer/shell/setup.sh | sha256sum | cut -d' ' -f1)"
runs() { "$venv/bin/python" -c "" 2>/dev/null; }
done_already() { runs && { [ -e "$venv/.pinned" ] || [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; }; }
done_already && exit 0

mkdir -p .venvs .cache || leave_full
image="${SPOTRL_IMAGE_DIR:-/opt/spotrl}/.venvs/$name" # the Dockerfile's, if this is its image and of the same commit
if [ ! -e "$venv" ] && [ "$(cat "$image/.stamp" 2>/dev/null)" = "$stamp" ]; then
    ln -sfn "$image" "$venv"
    echo "environment $name comes with the image"
    exit 0
fi
{ exec 9>".venvs/.$name.lock"; } || leave_full # nodes that share a file system take turns
flock 9
done_already && exit 0

export PATH="$HOME/.local/bin:$PWD/.cache/uv/bin:$PATH"
if ! command -v uv >/dev/null; then
    python3 -m pip --version >/dev/null 2>&1 ||
        { echo "uv is missing and there is no pip to fetch it: install uv and call this again" >&2; exit 2; }
    patiently python3 -m pip install --quiet --target "$PWD/.cache/uv" uv
fi

# Large wheels on slow links.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" UV_NO_PROGRESS=1
# Else every process of a machine that writes no bytecode compiles what it imports: 30 s of CPU for vLLM alone.
case "$name" in desk | data) ;; *) export UV_COMPILE_BYTECODE=1 ;; esac
if [ "$name" = gpu ] && ! command -v "${CC:-gcc}" >/dev/null && ! command -v clang >/dev/null; then
    echo "Triton builds its launchers with a C compiler, and there is none: install gcc, load the site's module, or set CC" >&2
    exit 2
fi
case "$name" in gpu) need_gib=20 ;; cpu | test) need_gib=8 ;; desk | data) need_gib=1 ;; *) need_gib=3 ;; esac
if [ "$(free_kib)" -lt $((need_gib * 1024 * 1024)) ]; then
    free="$PWD has $(($(free_kib) / 1024 / 1024)) GiB free and environment $name needs $need_gib"
    # A disk that never held as much is the wrong one; one that is full may be freed before the next start.
    if [ "$(df -Pk .venvs | awk 'NR==2 {print $2}')" -ge $((need_gib * 1024 * 1024)) ]; then leave "the disk is full" "$free: free some"; fi
    echo "error: $free: clone on a larger disk" >&2
    exit 2
fi

make_venv() { # in place of what a start that was cut short, or a Python that has gone, has left there
    if runs; then return 0; fi
    if [ -e "$venv/.pinned" ]; then
        echo "error: the Python of $PWD/$venv does not run, and its .pinned keeps it as it is: mend or remove that folder" >&2
        exit 2
    fi
    rm -rf "$venv" || leave_full
    patiently uv venv --quiet "$@" "$venv"
}

received() { # bytes from the network since boot; 0 where the system does not count them
    sed 's/:/ /' /proc/net/dev 2>/dev/null | awk '$1 != "lo" && $2 + 0 > 0 {sum += $2} END {printf "%.0f", sum}' || true
}
started="$SECONDS" before="$(received)"
echo "preparing environment $name (once; later starts are instant)"
rm -f "$venv/.stamp"
if [ "$name" = rocm ]; then
    # torch, vLLM and their GPU libraries come from the image (rocm/vllm); everything else is pinned by us.
    python3 -c "import torch, vllm; assert torch.version.hip" 2>/dev/null ||
        { echo "environment rocm is built on an image that has PyTorch and vLLM for ROCm, such as rocm/vllm: start there" >&2; exit 2; }
    make_venv --python "$(command -v python3)" --system-site-packages
    image='^(torch|torchvision|torchaudio|triton|vllm|xformers|flashinfer[a-z-]*|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)=='
    awk -v image="$image" '/^[A-Za-z0-9]/ {skip = ($0 ~ image)} !skip' "$lock" >".venvs/.rocm.txt"
    patiently uv pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r .venvs/.rocm.txt
else
    make_venv --python "${SPOTRL_PYTHON:-3.11}"
    if [ "$name" = desk ] || [ "$name" = data ]; then
        # The stores, and the hub's client with what it needs.
        hub='huggingface-hub|anyio|click|filelock|fsspec|h11|hf-xet|httpcore2|httpx2|idna|packaging|tqdm|truststore'
        desk="msgspec|obstore|pyyaml|typing-extensions|$hub"
        # Tables, images, bars, the grader's numbers, and the tokenizer of `--tokenizer`.
        rows='numpy|pillow|pyarrow|isal|rich|markdown-it-py|mdurl|pygments|mpmath'
        tokens='transformers|tokenizers|safetensors|regex|jinja2|markupsafe|typer|shellingham|annotated-doc'
        [ "$name" = desk ] || desk="$desk|$rows|$tokens"
        awk -v desk="^($desk)==" '/^[A-Za-z0-9]/ {keep = ($0 ~ desk)} keep' "$lock" >".venvs/.$name.txt"
        lock=".venvs/.$name.txt"
    fi
    patiently uv pip sync --quiet --python "$venv/bin/python" --require-hashes "$lock"
    # A package that left the lock takes files with it that another one shares.
    again="$("$venv/bin/python" trainer/shell/installed.py files | sed 's/^/--reinstall-package /')"
    # shellcheck disable=SC2086
    [ -z "$again" ] || patiently uv pip sync --quiet --python "$venv/bin/python" --require-hashes $again "$lock"
fi
if [ "$name" = gpu ]; then # before models and data are downloaded
    "$venv/bin/python" trainer/shell/installed.py imports
fi
took="$((SECONDS - started))" bytes="$(($(received) - before))"
echo "$stamp" >"$venv/.stamp"
echo "environment $name is ready after $took s: $((bytes / 1000000)) MB downloaded, $(du -sh "$venv" | cut -f1) on disk"
