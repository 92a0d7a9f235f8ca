#!/bin/bash
# A recipe on a TPU slice of a GKE cluster that xpk has made (https://github.com/AI-Hypercomputer/xpk):
#   CLUSTER=my-cluster IMAGE=gcr.io/my-project/affinage bash gke_xpk.sh recipe.yaml
# The image has affinage[tpu,gcs] and the recipe; /runs is a volume that all pods see. A pod that exits with 1 or 75, or
# that a signal ends (128 and more), starts the whole job again, up to --max-restarts times; after 2, a mistake, it ends.
# WORKLOAD=NAME before it names the run in the cluster, where each has a name of its own; by default one with the time.
# Checked for syntax only: it needs a cluster.
set -e
WORKLOAD=${WORKLOAD:-affinage-$(date +%m%d-%H%M%S)}
xpk workload create --cluster="$CLUSTER" --workload="$WORKLOAD" --tpu-type=v5litepod-64 --docker-image="$IMAGE" \
  --max-restarts=1000 --restart-on-exit-codes=1,75 --termination-grace-period-seconds=30 \
  --command="AFFINAGE_COORDINATOR=auto affinage run $1 --runs /runs"
