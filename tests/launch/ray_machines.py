"""A cluster of Ray on this machine that asks for no token, on the loopback address alone.

Machines come and go as the lines of standard input say: `come`, `go`. Each is answered by a line, the first by the
cluster's address.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "come":
            cluster.add_node(num_cpus=1)
        else:
            cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.node_id)[-1])
        print(line.strip(), flush=True)
    cluster.shutdown()
