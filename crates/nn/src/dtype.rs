//! Conversion between the dtypes of libtorch and of safetensors.

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

/// The safetensors dtype of a libtorch kind.
pub fn dtype_of(kind: Kind) -> Option<Dtype> {
    let mut kinds = KINDS.iter();
    kinds.find(|(k, _)| *k == kind).map(|(_, dtype)| *dtype)
}

/// The libtorch kind of a safetensors dtype.
pub fn kind_of(dtype: Dtype) -> Option<Kind> {
    let mut kinds = KINDS.iter();
    kinds.find(|(_, d)| *d == dtype).map(|(kind, _)| *kind)
}
