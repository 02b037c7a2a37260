#!/bin/bash
#SBATCH --job-name=tandem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=tandem-%j.log
#
# A Ray cluster over the nodes of the job, and a run on it: sbatch recipes/cluster/slurm.sh RECIPE [KEY=VALUE ...]
# The same command resumes the run. Tandem must be installed at the same path on every node.
set -euo pipefail

recipe=${1:?usage: sbatch slurm.sh RECIPE [KEY=VALUE ...]}
shift
port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | cut -d ' ' -f 1)

# one random token for the cluster of this job, in the environment of its processes only
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
  ray start --head --block --include-dashboard=false --node-ip-address="$address" --port="$port" &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap -x "$head" \
    ray start --block --address="$address:$port" &
fi

# the driver, on the first node; it waits a minute for the others
for _ in $(seq 60); do
  srun --nodes=1 --ntasks=1 --overlap -w "$head" ray status --address="$address:$port" >/dev/null 2>&1 && break
  sleep 2
done
srun --nodes=1 --ntasks=1 --overlap -w "$head" env -u SLURM_PROCID -u SLURM_NTASKS \
  tandem train "$recipe" cluster.address="$address:$port" cluster.nodes="$SLURM_JOB_NUM_NODES" "$@"
