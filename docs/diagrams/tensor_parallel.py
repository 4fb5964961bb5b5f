"""Which matrix of a block is cut along which dimension."""

from matrix_pair import draw_pair
from style import TOP, Label, Picture

TITLE = ("Tensor parallelism: two ranks split every matrix of a block", "张量并行：两个 rank 切分一个块的每个矩阵")
DESCRIPTION = (
    "In attention, q_proj, k_proj and v_proj are cut by columns, so a rank computes some heads; o_proj is cut by rows. In the MLP, "
    "gate_proj and up_proj are cut by columns and down_proj by rows. An all-reduce after the second matrix adds up the partial sums.",
    "注意力中，q_proj、k_proj、v_proj 按列切分，每个 rank 计算一部分头；o_proj 按行切分。MLP 中，gate_proj 和 up_proj 按列切分，"
    "down_proj 按行切分。第二个矩阵之后的 all-reduce 把部分和加起来。",
)
NOTE: Label = (
    "Matrices: inputs downwards, outputs to the right. By columns (colwise): along outputs; by rows (rowwise): inputs.\n"
    "Backward has an all-reduce before the first matrix of a pair: four all-reduces per block and step.",
    "矩阵的画法：向下为输入，向右为输出。按列（colwise）切分输出维，按行（rowwise）切分输入维。\n"
    "反向时在一对矩阵的第一个之前有一次 all-reduce：每个块每步共四次 all-reduce。",
)


def draw(p: Picture) -> None:
    draw_pair(
        p,
        TOP + 6,
        ("Attention: a rank computes half of the heads", "注意力：每个 rank 计算一半的头"),
        ["q_proj", "k_proj", "v_proj"],
        ("heads", "头"),
        "o_proj",
    )
    draw_pair(
        p,
        p.bottom() + 30,
        ("MLP: a rank computes half of the features", "MLP：每个 rank 计算一半的特征"),
        ["gate_proj", "up_proj"],
        ("features", "特征"),
        "down_proj",
    )
    p.note(NOTE)
