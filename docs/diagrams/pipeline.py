"""GPipe and 1F1B on the same stages and micro-batches, simulated."""

from style import LEFT, SMALL, TOP, Label, Picture
from timeline import Lanes

TITLE = ("Pipeline parallelism: 4 stages, 8 micro-batches", "流水线并行：4 个阶段，8 个微批次")
DESCRIPTION = (
    "Timelines of GPipe and 1F1B. GPipe runs all forwards, then all backwards, with 8 micro-batches in flight on every stage. 1F1B "
    "alternates after a warm-up, with 4, 3, 2 and 1 in flight. The bubble is the same: (p−1)/(m+p−1) of the time.",
    "GPipe 与 1F1B 的时间线。GPipe 先做全部前向，再做全部反向，每个阶段有 8 个微批次在途。1F1B 预热之后前向与反向交替，"
    "各阶段在途 4、3、2、1 个。两者的气泡相同：占时间的 (p−1)/(m+p−1)。",
)

NUM_STAGES, NUM_MICROBATCHES = 4, 8
FORWARD, BACKWARD = "forward", "backward"
COST = {FORWARD: 1, BACKWARD: 2}
KIND = {FORWARD: "activations", BACKWARD: "gradients"}

BUBBLE = (NUM_STAGES - 1) / (NUM_MICROBATCHES + NUM_STAGES - 1)
FORMULA: Label = (
    f"Bubble with p stages and m micro-batches: (p−1)/(m+p−1) = 3/11 = {BUBBLE:.0%} of the time in both. Here backward takes\n"
    "twice as long as forward. A micro-batch in flight keeps its activations in memory: 1F1B needs less of it.",
    f"气泡（p 个阶段，m 个微批次）：两者都占时间的 (p−1)/(m+p−1) = 3/11 = {BUBBLE:.0%}。图中反向耗时是前向的两倍。\n"
    "在途的微批次要把激活留在内存中：1F1B 需要的内存更少。",
)

Action = tuple[str, int]


def gpipe(stage: int) -> list[Action]:
    return [(what, i) for what in (FORWARD, BACKWARD) for i in range(NUM_MICROBATCHES)]


def one_f_one_b(stage: int) -> list[Action]:
    """Forwards until the first gradient can be there, then one backward and one forward in turn."""
    warm_up = min(NUM_MICROBATCHES, NUM_STAGES - stage - 1)
    actions: list[Action] = [(FORWARD, i) for i in range(warm_up)]
    for i in range(NUM_MICROBATCHES):
        if warm_up + i < NUM_MICROBATCHES:
            actions.append((FORWARD, warm_up + i))
        actions.append((BACKWARD, i))
    return actions


def simulate(schedule) -> list[dict[Action, int]]:
    """For each stage, when each of its actions begins: in order, and when its input has arrived."""
    todo = [schedule(stage) for stage in range(NUM_STAGES)]
    starts: list[dict[Action, int]] = [{} for _ in todo]
    free = [0] * NUM_STAGES
    while any(todo):
        for stage, actions in enumerate(todo):
            if not actions:
                continue
            what, i = actions[0]
            source = stage + (-1 if what == FORWARD else 1)
            is_input = not 0 <= source < NUM_STAGES
            if not is_input and actions[0] not in starts[source]:
                continue
            arrival = 0 if is_input else starts[source][what, i] + COST[what]
            starts[stage][what, i] = max(free[stage], arrival)
            free[stage] = starts[stage][what, i] + COST[what]
            actions.pop(0)
    return starts


def in_flight(starts: dict[Action, int]) -> int:
    """The largest number of micro-batches between their forward and the end of their backward."""

    def at(time: int) -> int:
        return sum(starts[FORWARD, i] <= time < starts[BACKWARD, i] + COST[BACKWARD] for i in range(NUM_MICROBATCHES))

    return max(map(at, starts.values()))


def draw(p: Picture) -> None:
    p.meanings |= {"activations": ("forward", "前向"), "gradients": ("backward", "反向"), "idle": ("bubble", "气泡")}
    panel(p, TOP + 6, ("GPipe: all forwards, then all backwards", "GPipe：先做全部前向，再做全部反向"), gpipe)
    panel(p, p.bottom() + 32, ("1F1B: one forward, one backward", "1F1B：一次前向，一次反向"), one_f_one_b)
    p.note(FORMULA)


def panel(p: Picture, y: float, heading: Label, schedule) -> None:
    p.heading(LEFT, y, heading)
    names: list[Label] = [(f"stage {stage}", f"阶段 {stage}") for stage in range(NUM_STAGES)]
    lanes = Lanes(p, LEFT + 60, y + 18, 17.2, names, height=24, gap=4)
    starts = simulate(schedule)
    end = max(start + COST[what] for stage in starts for (what, _), start in stage.items())
    assert end == (NUM_MICROBATCHES + NUM_STAGES - 1) * sum(COST.values()), "the simulation must agree with the formula"
    p.text(690, y, ("in flight", "在途微批次"), SMALL)
    for lane, stage in enumerate(starts):
        lanes.span(lane, 0, end, "idle")
        for (what, i), start in stage.items():
            lanes.span(lane, start, start + COST[what], KIND[what], str(i))
        p.text(690, lanes.row(lane) + lanes.height / 2, str(in_flight(stage)), SMALL)
    lanes.axis(end)
