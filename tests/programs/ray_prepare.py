"""Prepares a corpus on a Ray cluster of several nodes on this machine, one of which is killed. Arguments are JSON."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from fmsdata.prepare import prepare_corpus
from tests.programs.slow_prepare import Slow

list_nodes: Any = ray.nodes  # without types
shut_down: Any = ray.shutdown
NODE: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    output, report = Path(options.pop("output")), Path(options.pop("report"))
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    killed: list[int] = []

    def kill_a_node() -> None:
        while len(done := list((output / ".fmsdata-prepare" / "units").glob("*.json"))) < 2:
            time.sleep(0.02)
        cluster.remove_node(nodes[1], allow_graceful=False)
        killed.append(len(done))

    killer = threading.Thread(target=kill_a_node, daemon=True)
    killer.start()
    done = prepare_corpus(options.pop("source"), output, Slow(0.2), engine="ray", **options)
    killer.join(60)
    deadline = time.monotonic() + 60
    while (alive := sum(node["Alive"] for node in list_nodes())) > 2 and time.monotonic() < deadline:
        time.sleep(0.2)  # the cluster notices it by the lack of heartbeats
    found = {"tokens": done.tokens, "nodes": len(nodes) + 1, "alive": alive, "killed_after": killed}
    report.write_text(json.dumps(found))  # Ray prints to stdout
    shut_down()
    cluster.shutdown()


if __name__ == "__main__":
    main()
