#!/usr/bin/env bash
# Everything that the chapters on time, energy and fidelity read, on one Hopper or Blackwell GPU: about 25 minutes.
#
#   kernel/bench/run_all.sh [RESULTS] [--rehearse]
#
# The order is that of worth: gates first, because nothing is timed whose gate is red. Each step keeps what it finished
# and goes on there when called again; a step that is partial or red does not stop the next.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

results=
rehearse=()
few=()
for argument in "$@"; do
    case "$argument" in
    --rehearse) rehearse=(--rehearse) few=(--few) ;;
    *) results=$argument ;;
    esac
done
if [ -z "$results" ]; then
    # A rehearsal makes its times up: they have no place among results.
    if [ ${#rehearse[@]} -gt 0 ]; then results=$(mktemp -d); else results=results; fi
fi
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
lab() { "$python" -m softmaxlab.cli "$@"; }
status=0
step() {
    echo "== $*"
    "$@" || {
        echo "!! exit code $?: $*" >&2
        status=1
    }
}
bench() { step lab bench "$@" --results "$results" "${rehearse[@]}"; }

variants=(h15 "s(3)" "s(7)" fused7 "poly(1,all)" "poly(2,all)" "packed(4,3)" identity)
packed=("packed(1,3)" "packed(2,3)" "packed(3,3)" "packed(4,3)" "loose(4,3)" "lazy(4,3)")

step lab doctor
step lab gates --results "$results" "${rehearse[@]}"
step "$python" kernel/bench/packed_gates.py --variants "${packed[@]}" --out "$results/kernel/packed-gates.json" \
    "${rehearse[@]}" "${few[@]}"
bench latency --graphs --sweeps 15 --cells hopper --kernels "${variants[@]}" references --limit 400
bench latency --graphs --sweeps 15 --window-ms 200 --cells steady --limit 300 \
    --kernels h15 fused7 "packed(4,3)" "packed(1,3)" "lazy(4,3)" sdpa-cudnn
bench counters --cells bf16/causal/8192 bf16/none/8192 --kernels "${variants[@]}"
bench energy --kernels h15 "packed(4,3)"
bench timeline --kernels h15 "packed(4,3)"
bench latency --cells calls --kernels h15 "packed(4,3)" --limit 200
exit $status
