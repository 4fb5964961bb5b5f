"""Who watches whom in an elastic job, and what happens when a node is lost."""

from geometry import Box
from style import LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("Elastic training: node 2 is lost, the others continue", "弹性训练：节点 2 丢失，其余节点继续")
DESCRIPTION = (
    "Each node has one agent, which starts workers, reads their heartbeats and renews its lease at the rendezvous, our server or etcd. "
    "Node 2 sends no heartbeat. Its lease expires, the other agents stop their workers, a new world is formed under the next epoch, and "
    "new workers load the newest checkpoint.",
    "每个节点有一个代理，它启动工作进程、读取它们的心跳，并在集合点（自带的服务器或 etcd）续租。节点 2 不再发送心跳。它的租约到期，"
    "其余代理停止各自的工作进程，以下一个纪元组成新的 world，新的工作进程加载最新的检查点。",
)

NUM_NODES, WORKERS_PER_NODE = 3, 2
LOST = 2
NODE_W, NODE_H = 224, 196
NODES_Y = TOP + 150

STEPS: list[Label] = [
    ("The lease of\nnode 2 expires:\nit is lost.", "节点 2 的租约\n到期，视为丢失。"),
    ("The other agents\nstop their\nworkers.", "其余代理停止\n各自的工作进程。"),
    ("They wait a little\nfor a replacement\n(rejoin_timeout).", "在 rejoin_timeout\n内等待替补节点。"),
    ("A new world is\nformed: 2 nodes,\nepoch 8.", "组成新的 world：\n2 个节点，纪元 8。"),
    ("New workers load\nthe newest\ncheckpoint.", "新的工作进程加载\n最新的检查点。"),
]
RENDEZVOUS: Label = (
    "Rendezvous: which nodes are members, their ranks, the epoch (now 7)",
    "集合点（rendezvous）：哪些节点是成员、各自的 rank、纪元（现在是 7）",
)
SERVER: Label = (
    "server: one process, its record on disk;\nif its node is lost, so is the rendezvous",
    "server：一个进程，记录在磁盘上；\n它的节点丢失，集合点也随之丢失",
)
ETCD: Label = (
    "etcd: replicated over several nodes\n(Raft); any one of them may be lost",
    "etcd：在多个节点上复制（Raft）；\n可以丢失其中任何一个",
)
AGENT: Label = ("agent (trainyard run);\nholds in-memory checkpoints", "代理（trainyard run）；\n持有内存中的检查点")


def draw(p: Picture) -> None:
    p.meanings["idle"] = ("lost", "丢失")
    service = rendezvous(p)
    for node in range(NUM_NODES):
        x = LEFT + node * (RIGHT - LEFT - NODE_W) / (NUM_NODES - 1)
        draw_node(p, node, Box(x, NODES_Y, NODE_W, NODE_H), service)
    steps(p, NODES_Y + NODE_H + 24)


def rendezvous(p: Picture) -> Box:
    """The service that decides on members, ranks and epochs, in its two forms."""
    place = p.frame(LEFT, TOP, RIGHT - LEFT, 84, RENDEZVOUS)
    w = (place.w - 60) / 2
    p.box(place.x + 10, place.y + 32, w, 42, "plain", SERVER, SMALL)
    p.text(place.cx, place.y + 53, ("or", "或"))
    p.box(place.x1 - w - 10, place.y + 32, w, 42, "plain", ETCD, SMALL)
    return place


def draw_node(p: Picture, node: int, place: Box, service: Box) -> None:
    """An agent that watches its workers, and renews its lease unless its node is lost."""
    is_lost = node == LOST
    p.fill(place, "idle" if is_lost else "plain")
    name: Label = (f"node {node}" + " (lost)" * is_lost, f"节点 {node}" + "（丢失）" * is_lost)
    p.heading(place.x + 10, place.y1 - 14, name)
    agent = p.box(place.x + 10, place.y + 14, place.w - 20, 42, "plain", AGENT, SMALL)
    lease: Label = ("no heartbeat", "没有心跳") if is_lost else ("heartbeats\nrenew the lease", "心跳续租")
    p.arrow(agent.top, (agent.cx, service.y1), label=lease, side="right", dashed=is_lost)
    workers = draw_workers(p, node, Box(agent.x - 4, place.y + 116, agent.w + 8, 46))
    if not is_lost:
        for worker in workers:
            p.arrow(worker.top, (worker.cx, agent.y1))
        p.text(agent.cx, agent.y1 + 30, ("heartbeats", "心跳"), SMALL)


def draw_workers(p: Picture, node: int, place: Box) -> list[Box]:
    workers = []
    for i, part in enumerate(place.cut("x", WORKERS_PER_NODE)):
        rank = node * WORKERS_PER_NODE + i
        workers.append(p.fill(part.inset(4, 0), "plain", (f"worker\nrank {rank}", f"工作进程\nrank {rank}"), SMALL))
    return workers


def steps(p: Picture, y: float) -> None:
    p.heading(LEFT, y, ("What happens", "随后发生的事"))
    gap = 14
    w = (RIGHT - LEFT - gap * (len(STEPS) - 1)) / len(STEPS)
    for i, label in enumerate(STEPS):
        box = p.box(LEFT + i * (w + gap), y + 40, w, 62, "plain", label, SMALL)
        p.badge(box.x + 14, box.y - 12, i + 1)
        if i + 1 < len(STEPS):
            p.arrow(box.right, (box.x1 + gap, box.cy))
