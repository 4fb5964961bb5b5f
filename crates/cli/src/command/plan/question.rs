//! What every plan is asked with.

use trainyard_plan::{Calibration, Cluster, Overheads, Precision, Question, Shape, Software};

use crate::failure::Failure;

/// How numbers are held, by name.
pub(in crate::command) fn precision(name: &str) -> Result<Precision, String> {
    let (compute, parameter, optimizer) = match name {
        "bf16" => (2, 2, 12),
        "mixed" => (2, 4, 8),
        "fp32" => (4, 4, 8),
        _ => return Err("use bf16, mixed or fp32".to_owned()),
    };
    Ok(Precision {
        compute,
        parameter,
        gradient: 4,
        optimizer,
    })
}

/// The question, of a program as they are today.
pub(in crate::command) fn question(
    shape: Shape,
    cluster: Cluster,
    global_batch: usize,
    seq_len: usize,
    precision: Precision,
) -> Question {
    Question {
        shape,
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len,
        precision,
        fewer_machines: false,
    }
}

/// The cluster that a flag names.
pub(in crate::command) fn cluster(text: &str) -> Result<Cluster, Failure> {
    Cluster::named(text).map_err(Failure::new)
}
