//! Building blocks of plan requests.

use trainyard_arch::DecoderConfig;
use trainyard_plan::{
    Calibration, Cluster, Overheads, PlanRequest, Precision, PrecisionByStage, Software,
};

use crate::failure::Failure;

/// Parses a precision by name.
pub(in crate::command) fn precision(name: &str) -> Result<PrecisionByStage, String> {
    match name {
        "bf16" => Ok(PrecisionByStage::same(Precision::BF16)),
        "mixed" => Ok(PrecisionByStage::trainyard(2, 4)),
        "fp32" => Ok(PrecisionByStage::trainyard(4, 4)),
        _ => Err("use bf16, mixed or fp32".to_owned()),
    }
}

/// A plan request for a current training program.
pub(in crate::command) fn request(
    shape: DecoderConfig,
    cluster: Cluster,
    global_batch: usize,
    seq_len: usize,
    precision: PrecisionByStage,
) -> PlanRequest {
    PlanRequest {
        shape,
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len,
        precision,
        allow_fewer_nodes: false,
    }
}

/// Parses the cluster of a command line flag.
pub(in crate::command) fn cluster(text: &str) -> Result<Cluster, Failure> {
    Cluster::named(text).map_err(Failure::new)
}
