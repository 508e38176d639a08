#!/bin/bash
# A Ray cluster inside a Slurm allocation, and a profile that is made on it. Submit from the folder that holds the workloads:
#
#     sbatch profiling_runs/configs/slurm.sh 'models/gpt.py:gpt?size=tiny' --cluster 1x2 --microbatches 4 --global-batch 32
#
# Nothing is lost when the time is over: Slurm's SIGTERM ends the command in order, and the requeued job resumes from the store.
# The store is a file of the first node's own disk while the command runs (its log does not work on a network file system), and is kept
# in the folder of the submission between runs.
#SBATCH --job-name=capture-profile
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
set -euo pipefail

: "${1:?usage: sbatch slurm.sh WORKLOAD and options of capture profile}"
port=${RAY_PORT:-6379}
kept=$PWD/store.jsonl
store=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/capture-$SLURM_JOB_ID.sqlite
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_USAGE_STATS_ENABLED=0

srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" --include-dashboard=false --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 --exclude="$head" ray start --address="$head:$port" --block &
fi
until ray status --address="$head:$port" >/dev/null 2>&1; do sleep 1; done

if [ -e "$kept" ]; then capture store --store "$store" import "$kept"; fi
capture profile "$@" --ray "$head:$port" --store "$store" --events events.jsonl &
profile=$!
trap 'kill -TERM "$profile"' TERM
code=0
wait "$profile" || code=$?
if [ "$code" -gt 128 ]; then wait "$profile" || code=$?; fi # the first wait ends with the signal, the second with the command
capture store --store "$store" export "$kept.new" && mv "$kept.new" "$kept"
# 3: a node or the cluster was lost; 143: the time is over. Both resume.
if [ "$code" -eq 3 ] || [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
