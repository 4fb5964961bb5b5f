"""The nodes of a test: network namespaces on one bridge, which can be killed and disconnected from each other.

Needs root, `ip` and `tc`. The network of the host is not changed: the bridge is in its own namespace, the hub.
"""

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import cluster
from cluster import Process, Timeout

NETWORK = "10.77.0"
# A BPF program of one instruction for tc: drop the packet.
DROP = "1,6 0 0 2"
HOOKS = {"out": ["ingress"], "in": ["egress"], "both": ["ingress", "egress"]}  # as the hub sees them
LEASES = {"etcd": 6.0, "server": cluster.LEASE}


def ip(*args):
    subprocess.run(["ip", *args], check=True)


def kill_all_in(namespace):
    def left():
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    while pids := left():
        for pid in filter(cluster.is_running, pids):
            os.kill(pid, signal.SIGKILL)


class Node:
    """A network namespace with one address."""

    def __init__(self, hub, name, number):
        self.hub, self.name, self.port = hub, name, f"port{number}"
        self.address = f"{NETWORK}.{number}"
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", hub, "link", "set", self.port, "master", "bridge", "up")
        self.tc("qdisc", "add", "dev", self.port, "clsact")

    def tc(self, *args):
        subprocess.run(["ip", "netns", "exec", self.hub, "tc", *args], check=True)

    def start(self, command):
        return Process(["ip", "netns", "exec", self.name, *command])

    def fail(self):
        """Power off. Disconnects the node first, so that the others cannot see its processes exit."""
        self.plug(False)
        kill_all_in(self.name)

    def plug(self, is_in):
        ip("-n", self.hub, "link", "set", self.port, "up" if is_in else "down")

    def cut(self, direction):
        """Drops outgoing packets (`out`), incoming ones (`in`), or `both`."""
        for hook in HOOKS[direction]:
            self.tc("filter", "add", "dev", self.port, hook, "bpf", "da", "bytecode", DROP)

    def heal(self, direction):
        for hook in HOOKS[direction]:
            self.tc("filter", "del", "dev", self.port, hook)


class Network:
    """Nodes, and a hub between them, which can also run processes."""

    def __init__(self, num_nodes):
        mark = f"ty{os.getpid()}"
        self.hub, self.nodes = f"{mark}hub", []
        self.address = f"{NETWORK}.254"
        ip("netns", "add", self.hub)
        try:
            ip("-n", self.hub, "link", "set", "lo", "up")
            ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.hub, "address", "add", f"{self.address}/24", "dev", "bridge")
            ip("-n", self.hub, "link", "set", "bridge", "up")
            for number in range(1, num_nodes + 1):
                self.nodes.append(Node(self.hub, f"{mark}m{number}", number))
        except BaseException:
            self.close()
            raise

    def start(self, command):
        """Starts a process on the hub."""
        return Process(["ip", "netns", "exec", self.hub, *command])

    def post(self, url):
        """Sends a POST request from the hub; returns the JSON response, or None."""
        curl = ["curl", "-s", "-m", "1", "-X", "POST", "-d", "{}", url]
        response = subprocess.run(["ip", "netns", "exec", self.hub, *curl], capture_output=True, text=True).stdout
        try:
            return json.loads(response)
        except ValueError:
            return None

    def close(self):
        for node in self.nodes:
            kill_all_in(node.name)
            ip("netns", "delete", node.name)
        kill_all_in(self.hub)
        ip("netns", "delete", self.hub)


class Etcd:
    """An etcd cluster with a member on every node. Its data survive the nodes."""

    def __init__(self, network, dir):
        self.network, self.dir = network, dir
        self.members = {node: self.start(node) for node in network.nodes}
        hosts = ",".join(f"{node.address}:2379" for node in network.nodes)
        self.rdzv_args = ["--rdzv-backend", "etcd", "--rdzv-endpoint", hosts]
        self.leader()

    def start(self, node):
        peers = ",".join(f"{peer.name}=http://{peer.address}:2380" for peer in self.network.nodes)
        client, peer = f"http://{node.address}:2379", f"http://{node.address}:2380"
        command = ["etcd", "--name", node.name, "--data-dir", str(Path(self.dir) / node.name)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        # Without --pre-vote a member that was disconnected forces an election when it is back.
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", peers, "--pre-vote"]
        return node.start(command)

    def back(self, node):
        self.members[node] = self.start(node)

    def leader(self, among=None, within=30.0):
        """The node of the leader, once one of `among` is the leader."""
        among = among or self.network.nodes
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            for node in among:
                status = self.network.post(f"http://{node.address}:2379/v3/maintenance/status")
                if status and status.get("leader", "0") == status["header"]["member_id"]:
                    return node
            time.sleep(0.02)
        raise Timeout(f"etcd has no leader within {within} s")


class Server:
    """Our own rendezvous server, on the hub."""

    def __init__(self, network, dir, run, secret):
        endpoint = f"{network.address}:29400"
        command = [cluster.program("trainyard"), "rendezvous", "--rdzv-id", run, "--bind", endpoint]
        record = str(Path(dir) / "record")
        self.process = network.start([*command, "--run-secret-file", secret, "--record", record])
        self.process.wait_for("rendezvous of run")
        self.rdzv_args = ["--rdzv-backend", "server", "--rdzv-endpoint", endpoint]

    def back(self, node):
        pass


class Testbed:
    """Nodes with an agent and a worker each, with etcd or our server as rendezvous."""

    def __init__(self, num_nodes, nnodes, backend, steps=100_000):
        self.dir = tempfile.TemporaryDirectory()
        self.run = f"faults-{os.getpid()}-{secrets.token_hex(4)}"
        self.nnodes, self.steps, self.lease = nnodes, steps, LEASES[backend]
        self.secret = str(Path(self.dir.name) / "secret")
        with open(os.open(self.secret, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self.network = Network(num_nodes)
        self.nodes, self.agents, self.all_agents = self.network.nodes, {}, []
        try:
            match backend:
                case "etcd":
                    self.rendezvous = Etcd(self.network, self.dir.name)
                case "server":
                    self.rendezvous = Server(self.network, self.dir.name, self.run, self.secret)
            for node in self.nodes:
                self.agent(node)
        except BaseException:
            self.network.close()
            raise

    def agent(self, node):
        rdzv_args = ["--rdzv-id", self.run, *self.rendezvous.rdzv_args, "--local-addr", node.address]
        worker = cluster.train(self.steps, global_batch=cluster.DIVISIBLE_BATCH)
        command = cluster.agent_command(self.nnodes, rdzv_args, self.secret, worker, self.lease)
        self.agents[node] = node.start(command)
        self.all_agents.append(self.agents[node])

    def back(self, node):
        """Power on: the data on its disk are still there, those in its memory are lost."""
        node.plug(True)
        self.rendezvous.back(node)
        self.agent(node)

    def others(self, node):
        return [agent for other, agent in self.agents.items() if other is not node]

    def close(self):
        self.network.close()
        self.dir.cleanup()
