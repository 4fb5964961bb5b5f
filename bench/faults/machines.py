"""Machines of a test: network namespaces on one bridge, that can be killed and cut off from each other.

Needs root, `ip` and `tc`. Nothing of the host's own network is touched: the bridge is in a namespace too, the hub.
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
from cluster import Process, TooSlow

NETWORK = "10.77.0"
# A program of one instruction for tc's packet filter: drop it.
DROP = "1,6 0 0 2"
WAYS = {"out": ["ingress"], "in": ["egress"], "both": ["ingress", "egress"]}  # as the hub sees them
LEASES = {"etcd": 6.0, "server": cluster.LEASE}


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def end_all_in(namespace):
    def left():
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    while pids := left():
        for pid in filter(cluster.is_there, pids):
            os.kill(pid, signal.SIGKILL)


class Machine:
    """A namespace with one address."""

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

    def tc(self, *words):
        subprocess.run(["ip", "netns", "exec", self.hub, "tc", *words], check=True)

    def start(self, command):
        return Process(["ip", "netns", "exec", self.name, *command])

    def fail(self):
        """Power off: the cable first, so that nobody hears its processes die."""
        self.plug(False)
        end_all_in(self.name)

    def plug(self, is_in):
        ip("-n", self.hub, "link", "set", self.port, "up" if is_in else "down")

    def cut(self, way):
        """Nothing gets `out`, or nothing comes `in`, or `both`."""
        for hook in WAYS[way]:
            self.tc("filter", "add", "dev", self.port, hook, "bpf", "da", "bytecode", DROP)

    def heal(self, way):
        for hook in WAYS[way]:
            self.tc("filter", "del", "dev", self.port, hook)


class Network:
    """Machines, and a hub between them, which is one more."""

    def __init__(self, num_machines):
        mark = f"ty{os.getpid()}"
        self.hub, self.machines = f"{mark}hub", []
        self.address = f"{NETWORK}.254"
        ip("netns", "add", self.hub)
        try:
            ip("-n", self.hub, "link", "set", "lo", "up")
            ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.hub, "address", "add", f"{self.address}/24", "dev", "bridge")
            ip("-n", self.hub, "link", "set", "bridge", "up")
            for number in range(1, num_machines + 1):
                self.machines.append(Machine(self.hub, f"{mark}m{number}", number))
        except BaseException:
            self.close()
            raise

    def start(self, command):
        """On the hub."""
        return Process(["ip", "netns", "exec", self.hub, *command])

    def ask(self, url):
        """What is answered to a question in JSON, asked from the hub; none if nothing is."""
        asked = ["curl", "-s", "-m", "1", "-X", "POST", "-d", "{}", url]
        answer = subprocess.run(["ip", "netns", "exec", self.hub, *asked], capture_output=True, text=True).stdout
        try:
            return json.loads(answer)
        except ValueError:
            return None

    def close(self):
        for machine in self.machines:
            end_all_in(machine.name)
            ip("netns", "delete", machine.name)
        end_all_in(self.hub)
        ip("netns", "delete", self.hub)


class Etcd:
    """A member of etcd on every machine, whose data outlive it."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        self.members = {machine: self.start(machine) for machine in network.machines}
        hosts = ",".join(f"{machine.address}:2379" for machine in network.machines)
        self.place = ["--rdzv-backend", "etcd", "--rdzv-endpoint", hosts]
        self.leader()

    def start(self, machine):
        peers = ",".join(f"{peer.name}=http://{peer.address}:2380" for peer in self.network.machines)
        client, peer = f"http://{machine.address}:2379", f"http://{machine.address}:2380"
        command = ["etcd", "--name", machine.name, "--data-dir", str(Path(self.folder) / machine.name)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        # Without it, a member that was cut off unseats the leader when it is back.
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", peers, "--pre-vote"]
        return machine.start(command)

    def back(self, machine):
        self.members[machine] = self.start(machine)

    def leader(self, among=None, within=30.0):
        """The machine of the leader, as soon as one of `among` knows one that is among them."""
        among = among or self.network.machines
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            for machine in among:
                status = self.network.ask(f"http://{machine.address}:2379/v3/maintenance/status")
                if status and status.get("leader", "0") == status["header"]["member_id"]:
                    return machine
            time.sleep(0.02)
        raise TooSlow(f"etcd has no leader within {within} s")


class Server:
    """Our own rendezvous, on the hub: elsewhere."""

    def __init__(self, network, folder, run, secret):
        endpoint = f"{network.address}:29400"
        command = [cluster.compare.program("trainyard"), "rendezvous", "--rdzv-id", run, "--bind", endpoint]
        record = str(Path(folder) / "record")
        self.process = network.start([*command, "--secret-file", secret, "--record", record])
        self.process.wait_for("rendezvous of run")
        self.place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]

    def back(self, machine):
        pass


class Site:
    """Machines with an agent and a worker each, that meet in etcd or at a server."""

    def __init__(self, num_machines, nodes, backend, steps=100_000):
        self.folder = tempfile.TemporaryDirectory()
        self.run = f"faults-{os.getpid()}-{secrets.token_hex(4)}"
        self.nodes, self.steps, self.lease = nodes, steps, LEASES[backend]
        self.secret = str(Path(self.folder.name) / "secret")
        with open(os.open(self.secret, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self.network = Network(num_machines)
        self.machines, self.agents, self.all_agents = self.network.machines, {}, []
        try:
            match backend:
                case "etcd":
                    self.rendezvous = Etcd(self.network, self.folder.name)
                case "server":
                    self.rendezvous = Server(self.network, self.folder.name, self.run, self.secret)
            for machine in self.machines:
                self.agent(machine)
        except BaseException:
            self.network.close()
            raise

    def agent(self, machine):
        place = ["--rdzv-id", self.run, *self.rendezvous.place, "--local-addr", machine.address]
        worker = cluster.train(self.steps, global_batch=cluster.ANY_BATCH)
        command = cluster.agent_command(self.nodes, place, self.secret, worker, self.lease)
        self.agents[machine] = machine.start(command)
        self.all_agents.append(self.agents[machine])

    def back(self, machine):
        """Power on: what was on its disk is there, what was in its memory is not."""
        machine.plug(True)
        self.rendezvous.back(machine)
        self.agent(machine)

    def others(self, machine):
        return [agent for other, agent in self.agents.items() if other is not machine]

    def close(self):
        self.network.close()
        self.folder.cleanup()
