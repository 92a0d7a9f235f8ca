#!/bin/bash
# A recipe on a TPU slice of a GKE cluster that xpk has made (https://github.com/AI-Hypercomputer/xpk):
#   CLUSTER=my-cluster IMAGE=gcr.io/my-project/affinage bash gke_xpk.sh recipe.yaml
# The image has affinage[tpu,gcs] and the recipe; /runs is a volume that all pods see. A pod that exits with a status
# other than 0 starts the whole job again, up to --max-restarts times.
# Checked for syntax only: it needs a cluster.
set -e
xpk workload create --cluster="$CLUSTER" --workload=affinage --tpu-type=v5litepod-64 --docker-image="$IMAGE" \
  --max-restarts=1000 --termination-grace-period-seconds=30 \
  --command="AFFINAGE_COORDINATOR=auto affinage run $1 --runs /runs"
