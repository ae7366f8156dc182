#!/usr/bin/env bash
# Everything that needs a GPU, in one call on a machine that has one: tests, kernel records, benchmarks. Nothing is downloaded or installed.
#
#     OUT=results PYTHON=.venv/bin/python bash benchmarks/gpu_session.sh [PART …]
#
# Parts: tests kernels layer model moe decode (default: all, in this order). Each has its own time limit and log in $OUT; a part that fails or
# runs out of time is named at the end, and the others still run. LIMIT_<PART> (seconds) changes a limit. Exit code: how many parts failed.
set -u -o pipefail

OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-python}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
summary=$OUT/summary.txt
: > "$summary"
failed=0

say() {
    echo "$*" | tee -a "$summary"
}

limit_of() {  # part, default seconds
    local name="LIMIT_$1"
    echo "${!name:-$2}"
}

part() {  # name, seconds, command …
    local name=$1 seconds started code took
    seconds=$(limit_of "$1" "$2")
    shift 2
    [[ " $wanted " == *" $name "* ]] || return 0
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
}

wanted="${*:-tests kernels layer model moe decode}"
nvidia-smi > "$OUT/nvidia-smi.txt" 2>&1 || echo "nvidia-smi: not here" | tee -a "$summary"
"$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())' 2>&1 | tee -a "$summary"

# the files that have tests for a GPU, with all their tests: the rest of the suite needs none
mapfile -t gpu_tests < <(grep -rl --include='test_*.py' 'cuda.is_available' tests | sort)

part tests 420 "$PYTHON" -m pytest -q "${gpu_tests[@]}"
part kernels 420 "$PYTHON" -m unfreeze kernels measure --device cuda
part layer 360 "$PYTHON" -m benchmarks layer --append "$OUT/layer.jsonl"
part model 600 "$PYTHON" -m benchmarks model --append "$OUT/model.jsonl"
part moe 420 "$PYTHON" -m benchmarks moe --device cuda --append "$OUT/moe.jsonl"
# steps launched from the host beside steps replayed as CUDA graphs, and "unfreeze" by the records that part kernels has just made
part decode 420 "$PYTHON" -m benchmarks decode --device cuda --append "$OUT/decode.jsonl" \
    --sides unfreeze unfreeze-launched unfreeze-graphs transformers

cp -r src/unfreeze/kernels/records "$OUT/" 2>/dev/null || true
echo "results in $OUT" | tee -a "$summary"
exit "$failed"
