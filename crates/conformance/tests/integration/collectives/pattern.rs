//! Inputs of collectives that every rank can compute, so that it also knows the expected result.

use tch::{Kind, Tensor};
use trainyard_conformance::training::fingerprint;
use trainyard_conformance::{Rank, device};

/// The element types under test.
pub const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64];

/// Three MiB of float32 and one element more, which no number of ranks divides.
pub const LARGE: i64 = (3 << 20) / 4 + 1;

/// From zero, over less than one element per rank, to more than a socket buffer holds.
pub const LENGTHS: [i64; 8] = [0, 1, 2, 3, 5, 64, 1001, LARGE];

/// Small integers, different on every rank, whose sums are exact in every type.
pub fn whole(rank: usize, length: i64, kind: Kind) -> Tensor {
    let cycle = Tensor::arange(length, (Kind::Int64, device())).remainder(7) + 1;
    (cycle * (rank as i64 + 1)).to_kind(kind)
}

/// Numbers, different on every rank, whose sum depends on the order of summation.
pub fn irregular(rank: usize, length: i64, kind: Kind) -> Tensor {
    let positions = Tensor::arange(length, (Kind::Double, device()));
    (positions * (0.7 + rank as f64) + 0.3).sin().to_kind(kind)
}

/// An output tensor with values that no result has.
pub fn room(length: i64, kind: Kind) -> Tensor {
    Tensor::full(length, -77, (kind, device()))
}

/// Panics unless the tensors have the same shape, type and elements.
pub fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(
        (found.kind(), found.size()),
        (expected.kind(), expected.size()),
        "{what}"
    );
    assert!(
        found.equal(expected),
        "{what}: {found:?} is not what was expected: {}",
        first_difference(found, expected)
    );
}

fn first_difference(found: &Tensor, expected: &Tensor) -> String {
    let (found, expected) = (found.flatten(0, -1), expected.flatten(0, -1));
    let at = found
        .ne_tensor(&expected)
        .to_kind(Kind::Int64)
        .argmax(0, false)
        .int64_value(&[]);
    let value = |t: &Tensor| t.to_kind(Kind::Double).double_value(&[at]);
    format!(
        "element {at} is {}, not {}",
        value(&found),
        value(&expected)
    )
}

/// Panics unless all ranks have the same bits.
pub fn assert_identical(
    rank: &Rank,
    tensor: &Tensor,
    what: &str,
) -> Result<(), trainyard_torch::TorchError> {
    let all = rank.all_gather(&fingerprint(tensor))?;
    assert!(
        all.iter().all(|each| *each == all[0]),
        "{what}: ranks differ"
    );
    Ok(())
}
