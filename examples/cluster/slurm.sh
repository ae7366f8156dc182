#!/usr/bin/env bash
# sbatch slurm.sh        Edit the lines marked EDIT, or give them: sbatch --nodes=4 --export=ALL,SHARED=/data slurm.sh
#SBATCH --job-name=unfreeze
#SBATCH --nodes=2                # EDIT; 1 is fine
#SBATCH --ntasks-per-node=1      # one torchrun a node, which starts a process per GPU
#SBATCH --gpus-per-node=8        # EDIT
#SBATCH --cpus-per-task=64       # EDIT
#SBATCH --exclusive
#SBATCH --time=24:00:00          # EDIT; longer runs go on in the next turn
#SBATCH --signal=USR1@360        # six minutes before the time is up: end the step and save (GRACE + 30 s and room)
#SBATCH --requeue                # a preempted job, or one whose node died, goes back into the queue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

SHARED=${SHARED:-/shared/unfreeze}            # EDIT: a folder that all nodes see, with node.sh and run.toml in it
export RUN=${RUN:-$SHARED/runs/$SLURM_JOB_NAME}
export HF_HOME=${HF_HOME:-$SHARED/huggingface}   # a model of the Hub is downloaded once
# EDIT: source "$SHARED/venv/bin/activate"

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD NODES=$SLURM_JOB_NUM_NODES PROCESSES=$SLURM_GPUS_ON_NODE
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / PROCESSES))

# --kill-on-bad-exit=0: each node says for itself how it ended; srun gives the highest code of all
code=0
# shellcheck disable=SC2016  # SLURM_NODEID is each node's own
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \
  bash -c 'NODE=$SLURM_NODEID exec bash "$@"' _ "$SHARED/node.sh" "$SHARED/run.toml" || code=$?

# 75: interrupted, all is saved (node.sh). A fault is not tried again.
if [ "$code" = 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
