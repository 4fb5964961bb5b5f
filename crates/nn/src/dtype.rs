//! Types of elements, as libtorch and as safetensors call them.

use safetensors::Dtype;
use tch::Kind;

const KINDS: [(Kind, Dtype); 8] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

/// What safetensors calls a kind.
pub fn dtype_of(kind: Kind) -> Option<Dtype> {
    let mut kinds = KINDS.iter();
    kinds.find(|(k, _)| *k == kind).map(|(_, dtype)| *dtype)
}

/// What libtorch calls a type.
pub fn kind_of(dtype: Dtype) -> Option<Kind> {
    let mut kinds = KINDS.iter();
    kinds.find(|(_, d)| *d == dtype).map(|(kind, _)| *kind)
}
