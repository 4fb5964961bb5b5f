//! What every plan is asked with.

use trainyard_plan::{Calibration, Cluster, Held, Overheads, Precision, Question, Shape, Software};

use crate::failure::Failure;

/// How numbers are held, by name.
pub(in crate::command) fn held(name: &str) -> Result<Held, String> {
    match name {
        "bf16" => Ok(Held::same(Precision::BF16)),
        "mixed" => Ok(Held::ours(2, 4)),
        "fp32" => Ok(Held::ours(4, 4)),
        _ => Err("use bf16, mixed or fp32".to_owned()),
    }
}

/// The question, of a program as they are today.
pub(in crate::command) fn question(
    shape: Shape,
    cluster: Cluster,
    global_batch: usize,
    seq_len: usize,
    held: Held,
) -> Question {
    Question {
        shape,
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len,
        held,
        fewer_machines: false,
    }
}

/// The cluster that a flag names.
pub(in crate::command) fn cluster(text: &str) -> Result<Cluster, Failure> {
    Cluster::named(text).map_err(Failure::new)
}
