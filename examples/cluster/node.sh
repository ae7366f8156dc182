#!/usr/bin/env bash
# One node's part of a run. slurm.sh, kubernetes.yaml and skypilot.yaml start it, once on every node:
#
#   RUN=/shared/runs/mine NODES=2 NODE=0 HEAD=node-a PROCESSES=8 bash node.sh /shared/run.toml
#
# The arguments are those of `unfreeze sft`. All nodes get the same ones, and see the same RUN on a shared disk.
#
#   RUN        the run's folder. The same command goes on from the last save in it.
#   NODES      nodes of the run.                                     NODE       which of them this is, from 0.
#   HEAD       name or address of node 0, where the others meet it.  PORT       its port there (29500).
#   PROCESSES  processes on this node: one per GPU.
#   RESTARTS   how often torchrun starts the processes again where one of them has died (3).
#   GRACE      seconds for the last step and its save, once a signal has come (240). The scheduler has to give
#              30 more before it kills.
#   MEET       seconds to wait until all nodes are there (900).
#
# Exit code 0: the run is finished.  75: interrupted and saved, give it again.  Another: a fault; see the log.
set -euo pipefail
trap 'exit 75' TERM USR1 INT  # nothing runs yet

: "${RUN:?the folder of the run, on a disk that all nodes see}"
: "${NODES:?how many nodes}" "${NODE:?which node this is, from 0}" "${HEAD:?name or address of node 0}"
: "${PROCESSES:?processes per node, one per GPU}"
PORT=${PORT:-29500} RESTARTS=${RESTARTS:-3} GRACE=${GRACE:-240} MEET=${MEET:-900}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$GRACE

# Slurm sends SIGUSR1 to every process of the step. torchrun, which has no handler for it, would die of it.
# Node 0 holds the store that the nodes meet at; which process becomes the first is torchrun's choice.
store=$([ "$NODE" = 0 ] && echo true || echo false)
(
  trap '' USR1
  exec torchrun \
    --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$(basename "$RUN")" \
    --rdzv-conf "is_host=$store,join_timeout=$MEET,read_timeout=$MEET" \
    -m unfreeze sft "$@" --out "$RUN"
) &
torchrun=$! signalled=no watchdog=

# A signal goes to the processes, which end their step, save and leave with 0; then torchrun ends too, here
# and on the other nodes. Sent to torchrun, it would leave the other nodes waiting for this one's torchrun.
# /proc: an image may have no pkill.
# shellcheck disable=SC2329  # the traps below call it
pass_on() {
  [ "$signalled" = no ] || return 0
  signalled=yes
  # shellcheck disable=SC2046  # a word per process
  kill -TERM $(cat /proc/"$torchrun"/task/*/children) 2>/dev/null || true
  (sleep "$GRACE" && kill -TERM "$torchrun") 2>/dev/null &
  watchdog=$!
}
trap pass_on TERM USR1 INT

# `wait` returns at a trapped signal too, so it is asked until torchrun is gone
while true; do
  code=0
  wait "$torchrun" || code=$?
  kill -0 "$torchrun" 2>/dev/null || break
done
[ -z "$watchdog" ] || kill "$watchdog" 2>/dev/null || true

# unfreeze ends with 0 after an interruption, which a scheduler would take for the end of the run
finished='import sys, unfreeze; sys.exit(not unfreeze.FinishedRun(sys.argv[1]).finished)'
if [ "$code" = 0 ] && python -c "$finished" "$RUN" 2>/dev/null; then exit 0; fi
if [ "$code" = 0 ] || [ "$signalled" = yes ]; then
  echo "node $NODE: interrupted; the same command goes on from the last save in $RUN" >&2
  exit 75
fi
exit "$code"
