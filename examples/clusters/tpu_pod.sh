#!/bin/bash
# A recipe on all machines of a Cloud TPU slice, for example a v4-32 with 4 machines:
#   NAME=my-slice ZONE=us-central2-b bash tpu_pod.sh recipe.yaml
# Every machine needs affinage[tpu] and /mnt/runs, a disk that all of them see, such as Filestore.
# Checked for syntax only: it needs a slice of TPUs.
set -e
affinage plan "$1" --on v4-32      # before anything is paid for: does it fit, how long, how much
gcloud compute tpus tpu-vm scp "$1" "$NAME": --zone="$ZONE" --worker=all
gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="
  export AFFINAGE_COORDINATOR=auto JAX_COMPILATION_CACHE_DIR=/mnt/runs/.compiled
  until affinage run $(basename "$1") --runs /mnt/runs
  do test \$? -eq 2 && break; sleep 5; done"
