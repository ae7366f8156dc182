#!/usr/bin/env bash
# The first hour with a GPU: what works on the card, then kernel records, benchmarks and profiles. Nothing is downloaded or installed.
#
#     OUT=results PYTHON=.venv/bin/python bash benchmarks/gpu_session.sh [PART …]
#
# Parts (default: all, in this order), each of at most ten minutes, so that it can be repeated alone:
#
#     doctor      every kernel against float64; if it fails, nothing else runs (KEEP_GOING=1: the rest runs without the banned kernels)
#     tests       the test files that have tests for a GPU
#     kernels     kernel records, into the package
#     kimi        one layer of Kimi-K2 with an eighth of its experts
#     gpt-oss     gpt-oss-20b, experts in MXFP4
#     qwen3       Qwen3-30B-A3B, experts in INT4 and in bf16
#     llama       Llama-3.1-8B
#     moe decode  LoRA on every expert, and generation, beside transformers
#
# LIMIT_<PART> (seconds, - as _) changes a limit. $OUT gets a log of each part, the doctor's table, rows (*.jsonl), profiles of a step
# (traces/, for Perfetto) and records.patch: the kernel records, to commit. Exit code: how many parts failed.
set -u -o pipefail

OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-python}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT/traces"
OUT=$(cd "$OUT" && pwd)
summary=$OUT/summary.txt
: > "$summary"
failed=0
wanted="${*:-doctor tests kernels kimi gpt-oss qwen3 llama moe decode}"

say() {
    echo "$*" | tee -a "$summary"
}

part() {  # name, seconds, command …
    local name=$1 seconds=$2 limit started code took
    shift 2
    [[ " $wanted " == *" $name "* ]] || return 0
    limit="LIMIT_${name//-/_}"
    seconds=${!limit:-$seconds}
    started=$(date +%s)
    timeout --kill-after=20 "$seconds" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    took="$(($(date +%s) - started)) s"
    case $code in
        0) say "$name: done, $took" ;;
        124 | 137) say "$name: NOT FINISHED within $seconds s, see $name.log" ;;
        *) say "$name: FAILED with exit code $code after $took, see $name.log" ;;
    esac
    if [ "$code" -ne 0 ]; then
        failed=$((failed + 1))
        tail -n 5 "$OUT/$name.log" | sed 's/^/    /'
    fi
    return "$code"
}

doctor() {  # the table for people in the log, and as JSON
    "$PYTHON" -m unfreeze doctor --gpu --json > "$OUT/doctor.json"
}

gpu_tests() {
    local files
    mapfile -t files < <(grep -rl --include='test_*.py' 'cuda.is_available' tests | sort)
    "$PYTHON" -m pytest -q "${files[@]}"
}

bench() {  # case, options …
    "$PYTHON" -m benchmarks "$@" --append "$OUT/$1.jsonl"
}

model() {
    bench model --traces "$OUT/traces" --models "$@"
}

finish() {
    "$PYTHON" -m unfreeze doctor --bundle > "$OUT/bundle.log" 2>&1 && mv unfreeze-bundle.txt "$OUT/" 2>/dev/null
    git add --intent-to-add src/unfreeze/kernels/records 2>/dev/null
    git diff --binary -- src/unfreeze/kernels/records > "$OUT/records.patch" 2>/dev/null
    say "results in $OUT"
    exit "$failed"
}

nvidia-smi > "$OUT/nvidia-smi.txt" 2>&1 || say "nvidia-smi: not here"
"$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())' 2>&1 | tee -a "$summary"

# functions run in a shell of their own, so that timeout can end them
export -f doctor gpu_tests bench model
export OUT PYTHON
if ! part doctor 600 bash -c doctor && [ -z "${KEEP_GOING:-}" ]; then
    say "stopped: what the doctor found stands in doctor.log"
    finish
fi
part tests 420 bash -c gpu_tests
part kernels 420 "$PYTHON" -m unfreeze dev kernels measure --device cuda
part kimi 360 bash -c 'bench layer'
part gpt-oss 420 bash -c 'model gpt-oss-20b'
part qwen3 600 bash -c 'model qwen3-30b-a3b-int4 qwen3-30b-a3b-bf16'
part llama 420 bash -c 'model llama-3.1-8b'
part moe 420 bash -c 'bench moe --device cuda'
# steps launched from the host beside steps replayed as CUDA graphs, and "unfreeze" by the records that part kernels has just made
part decode 420 bash -c 'bench decode --device cuda --models moe --cases 1x64 16x64 1x512 --compile-seconds 0 --sides unfreeze unfreeze-launched unfreeze-graphs transformers'
finish
