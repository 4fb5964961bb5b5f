//! What ranks hold before a collective: known to every rank, so that each can tell what comes out.

use tch::{Device, Kind, Tensor};
use trainyard_conformance::Rank;
use trainyard_conformance::training::fingerprint;

/// The types collectives are asked to carry.
pub const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64];

/// Three mebibytes of float32, and one element more, so that no number of ranks divides it.
pub const LARGE: i64 = (3 << 20) / 4 + 1;

/// From nothing over less than an element per rank to more than a socket buffers.
pub const LENGTHS: [i64; 8] = [0, 1, 2, 3, 5, 64, 1001, LARGE];

/// Small whole numbers, different on every rank, whose sums are exact in every type.
pub fn whole(rank: usize, length: i64, kind: Kind) -> Tensor {
    let cycle = Tensor::arange(length, (Kind::Int64, Device::Cpu)).remainder(7) + 1;
    (cycle * (rank as i64 + 1)).to_kind(kind)
}

/// Irregular numbers, different on every rank, whose sum depends on the order of adding.
pub fn irregular(rank: usize, length: i64, kind: Kind) -> Tensor {
    let positions = Tensor::arange(length, (Kind::Double, Device::Cpu));
    (positions * (0.7 + rank as f64) + 0.3).sin().to_kind(kind)
}

/// Room that no result could be mistaken for.
pub fn room(length: i64, kind: Kind) -> Tensor {
    Tensor::full(length, -77, (kind, Device::Cpu))
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

/// Panics unless every rank holds the same bits.
pub fn assert_identical(
    rank: &Rank,
    tensor: &Tensor,
    what: &str,
) -> Result<(), trainyard_torch::TorchError> {
    let all = rank.everyone(&fingerprint(tensor))?;
    assert!(
        all.iter().all(|each| *each == all[0]),
        "{what}: ranks differ"
    );
    Ok(())
}
