//! All-reduce, reduce-scatter and reduce.

use tch::{Kind, Tensor};
use trainyard_conformance::{Case, Outcome, Rank};
use trainyard_torch::ReduceOp;
use trainyard_trace::Purpose;

use super::pattern::{
    KINDS, LARGE, LENGTHS, assert_identical, assert_same, irregular, room, whole,
};

pub const CASES: &[Case] = &[
    Case {
        name: "all_reduce_sums_every_type_and_length",
        run: all_reduce_sums,
    },
    Case {
        name: "all_reduce_supports_every_operation",
        run: all_reduce_operations,
    },
    Case {
        name: "all_reduce_adds_in_rank_order",
        run: all_reduce_order,
    },
    Case {
        name: "a_mean_is_the_same_on_all_ranks",
        run: all_reduce_means,
    },
    Case {
        name: "a_mean_of_integers_is_rejected",
        run: integer_means,
    },
    Case {
        name: "reduce_scatter_sums_every_type_and_length",
        run: reduce_scatter_sums,
    },
    Case {
        name: "reduce_scatter_adds_in_rank_order",
        run: reduce_scatter_order,
    },
    Case {
        name: "reduce_scatter_supports_every_operation",
        run: reduce_scatter_operations,
    },
    Case {
        name: "reduce_to_every_root",
        run: reduce_roots,
    },
    Case {
        name: "results_do_not_depend_on_the_transport",
        run: transports,
    },
    Case {
        name: "many_collectives_can_be_pending",
        run: many_under_way,
    },
    Case {
        name: "shapes_are_preserved",
        run: shapes,
    },
];

const PURPOSE: Purpose = Purpose::Gradient;

/// 1 + 2 + ... + n times the input of rank 0.
fn whole_sum(size: usize, length: i64, kind: Kind) -> Tensor {
    let factor = (size * (size + 1) / 2) as i64;
    (whole(0, length, Kind::Int64) * factor).to_kind(kind)
}

/// The inputs of all ranks, reduced in rank order.
fn in_rank_order(
    size: usize,
    length: i64,
    kind: Kind,
    combine: impl Fn(Tensor, Tensor) -> Tensor,
) -> Tensor {
    (1..size).fold(irregular(0, length, kind), |so_far, rank| {
        combine(so_far, irregular(rank, length, kind))
    })
}

fn all_reduce_sums(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for kind in KINDS {
        for length in LENGTHS {
            let tensor = whole(rank.index(), length, kind);
            group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()?;
            assert_same(
                &tensor,
                &whole_sum(rank.size(), length, kind),
                &format!("{kind:?} of {length}"),
            );
        }
    }
    Ok(())
}

fn all_reduce_operations(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let (size, length) = (rank.size() as i64, 1001);
    let first = whole(0, length, Kind::Int64);
    let product = (1..=size).product::<i64>() * first.pow_tensor_scalar(size);
    for kind in [Kind::Float, Kind::Double, Kind::Int64] {
        for (op, expected) in [
            (ReduceOp::Max, &first * size),
            (ReduceOp::Min, first.copy()),
            (ReduceOp::Product, product.copy()),
        ] {
            let tensor = whole(rank.index(), length, kind);
            group.all_reduce(&tensor, op, PURPOSE)?.wait()?;
            assert_same(
                &tensor,
                &expected.to_kind(kind),
                &format!("{op:?} of {kind:?}"),
            );
        }
    }
    Ok(())
}

fn all_reduce_order(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("NCCL chooses the order of a sum") {
        return Ok(());
    }
    let group = rank.world()?.world_group()?;
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        for length in [5, 1001, LARGE] {
            let tensor = irregular(rank.index(), length, kind);
            group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()?;
            let expected = in_rank_order(rank.size(), length, kind, |a, b| a + b);
            assert_same(&tensor, &expected, &format!("{kind:?} of {length}"));
        }
    }
    Ok(())
}

fn all_reduce_means(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for (kind, allowed) in [
        (Kind::Float, 1e-6),
        (Kind::Double, 1e-15),
        (Kind::BFloat16, 2e-2),
    ] {
        for length in LENGTHS {
            let what = format!("mean of {kind:?} of {length}");
            let tensor = irregular(rank.index(), length, kind);
            group.all_reduce(&tensor, ReduceOp::Mean, PURPOSE)?.wait()?;
            assert_identical(rank, &tensor, &what)?;
            if length > 0 {
                let sum = in_rank_order(rank.size(), length, Kind::Double, |a, b| a + b);
                let off = (tensor.to_kind(Kind::Double) - sum / rank.size() as f64)
                    .abs()
                    .max();
                assert!(off.double_value(&[]) <= allowed, "{what} is off by {off:?}");
            }
        }
    }
    Ok(())
}

fn transports(rank: &Rank) -> Outcome {
    let worlds = [rank.world()?, rank.world_over_network()?];
    for kind in [Kind::Float, Kind::BFloat16] {
        for length in [1, 1001, LARGE] {
            let size = rank.size() as i64;
            let mut results = Vec::new();
            for world in &worlds {
                let group = world.world_group()?;
                let all = irregular(rank.index(), size * length, kind);
                let own = room(length, kind);
                group
                    .reduce_scatter(&own, &all, ReduceOp::Mean, PURPOSE)?
                    .wait()?;
                let gathered = room(size * length, kind);
                group.all_gather(&gathered, &own, PURPOSE)?.wait()?;
                group
                    .on_caller()
                    .all_reduce(&all, ReduceOp::Mean, PURPOSE)?
                    .wait()?;
                results.push([gathered, all]);
            }
            for (shared, sent) in results[0].iter().zip(&results[1]) {
                assert_same(shared, sent, &format!("{kind:?} of {length}"));
            }
        }
    }
    Ok(())
}

fn integer_means(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for length in [1, 1001] {
        let tensor = whole(rank.index(), length, Kind::Int64);
        let rejected = group
            .all_reduce(&tensor, ReduceOp::Mean, PURPOSE)
            .and_then(|work| work.wait());
        assert!(
            rejected.is_err(),
            "the mean of integers came out as {tensor:?}"
        );
    }
    // All ranks rejected the call, so nothing is pending.
    let tensor = whole(rank.index(), 1001, Kind::Int64);
    group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()?;
    assert_same(
        &tensor,
        &whole_sum(rank.size(), 1001, Kind::Int64),
        "after the rejection",
    );
    Ok(())
}

/// Numbers of elements of one rank's shard.
const PARTS: [i64; 5] = [0, 1, 3, 1001, LARGE / 3];

fn part_of(tensor: &Tensor, rank: &Rank) -> Tensor {
    let part = tensor.numel() as i64 / rank.size() as i64;
    tensor.narrow(0, rank.index() as i64 * part, part)
}

fn reduce_scatter_sums(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for kind in KINDS {
        for part in PARTS {
            let length = part * rank.size() as i64;
            let (input, out) = (whole(rank.index(), length, kind), room(part, kind));
            group
                .reduce_scatter(&out, &input, ReduceOp::Sum, PURPOSE)?
                .wait()?;
            let what = format!("{kind:?} in parts of {part}");
            assert_same(
                &out,
                &part_of(&whole_sum(rank.size(), length, kind), rank),
                &what,
            );
            assert_same(&input, &whole(rank.index(), length, kind), "the input");
        }
    }
    Ok(())
}

fn reduce_scatter_order(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("NCCL chooses the order of a sum") {
        return Ok(());
    }
    let group = rank.world()?.world_group()?;
    for kind in [Kind::Float, Kind::BFloat16] {
        for part in [1, 1001, LARGE / 3] {
            let length = part * rank.size() as i64;
            let (input, out) = (irregular(rank.index(), length, kind), room(part, kind));
            group
                .reduce_scatter(&out, &input, ReduceOp::Sum, PURPOSE)?
                .wait()?;
            let sum = in_rank_order(rank.size(), length, kind, |a, b| a + b);
            assert_same(
                &out,
                &part_of(&sum, rank),
                &format!("{kind:?} in parts of {part}"),
            );
        }
    }
    Ok(())
}

fn reduce_scatter_operations(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let (part, size) = (1001, rank.size() as i64);
    let first = whole(0, part * size, Kind::Float);
    let mean = &first * ((size + 1) as f64 / 2.0);
    for (op, expected) in [
        (ReduceOp::Max, &first * size),
        (ReduceOp::Min, first.copy()),
        (ReduceOp::Mean, mean),
    ] {
        let (input, out) = (
            whole(rank.index(), part * size, Kind::Float),
            room(part, Kind::Float),
        );
        group.reduce_scatter(&out, &input, op, PURPOSE)?.wait()?;
        let off = (&out - part_of(&expected, rank))
            .abs()
            .max()
            .double_value(&[]);
        assert!(off <= 1e-5, "{op:?} is off by {off}");
    }
    Ok(())
}

fn reduce_roots(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for root in 0..rank.size() {
        for kind in [Kind::Float, Kind::Double, Kind::Int64] {
            for length in [1, 5, 1001, LARGE] {
                let tensor = whole(rank.index(), length, kind);
                group
                    .reduce(&tensor, root, ReduceOp::Sum, PURPOSE)?
                    .wait()?;
                if root == rank.index() {
                    let what = format!("{kind:?} of {length} at {root}");
                    assert_same(&tensor, &whole_sum(rank.size(), length, kind), &what);
                }
            }
        }
        let tensor = whole(rank.index(), 5, Kind::Float);
        group
            .reduce(&tensor, root, ReduceOp::Max, PURPOSE)?
            .wait()?;
        if root == rank.index() {
            assert_same(&tensor, &whole(rank.size() - 1, 5, Kind::Float), "largest");
        }
    }
    Ok(())
}

fn many_under_way(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let tensors: Vec<Tensor> = (1..60)
        .map(|length| whole(rank.index(), length * 17, Kind::Float))
        .collect();
    let mut works = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        // Both implementations: direct collectives and the backend's own.
        let op = if index % 3 == 0 {
            ReduceOp::Max
        } else {
            ReduceOp::Sum
        };
        works.push((op, group.all_reduce(tensor, op, PURPOSE)?));
    }
    // The caller may wait in any order: here from last to first.
    for ((op, work), tensor) in works.into_iter().zip(&tensors).rev() {
        work.wait()?;
        let length = tensor.numel() as i64;
        let expected = match op {
            ReduceOp::Max => whole(rank.size() - 1, length, Kind::Float),
            _ => whole_sum(rank.size(), length, Kind::Float),
        };
        assert_same(tensor, &expected, &format!("{op:?} of {length}"));
    }
    Ok(())
}

fn shapes(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    for shape in [&[3i64, 5, 7][..], &[1, 1][..], &[][..]] {
        let length = shape.iter().product();
        let tensor = whole(rank.index(), length, Kind::Double).view(shape);
        group.all_reduce(&tensor, ReduceOp::Sum, PURPOSE)?.wait()?;
        assert_same(
            &tensor,
            &whole_sum(rank.size(), length, Kind::Double).view(shape),
            "shaped",
        );
    }
    // A slice of a larger tensor: its surroundings stay unchanged.
    let whole_tensor = room(30, Kind::Float);
    let mut piece = whole_tensor.narrow(0, 10, 10);
    piece.copy_(&whole(rank.index(), 10, Kind::Float));
    group.all_reduce(&piece, ReduceOp::Sum, PURPOSE)?.wait()?;
    assert_same(&piece, &whole_sum(rank.size(), 10, Kind::Float), "piece");
    assert_same(
        &whole_tensor.narrow(0, 0, 10),
        &room(10, Kind::Float),
        "before it",
    );
    assert_same(
        &whole_tensor.narrow(0, 20, 10),
        &room(10, Kind::Float),
        "after it",
    );
    Ok(())
}
