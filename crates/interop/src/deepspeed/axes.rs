//! The parallel degrees that a file states, beside data parallelism.

use super::super::FrameworkError;
use super::NOTES;
use super::file::File;
use super::moe;

pub(super) const TENSOR: &str = "tensor_parallel.autotp_size";
pub(super) const STAGES: [&str; 2] = ["pipeline.stages", "pipeline.num_stages"];
pub(super) const SEQUENCE: &str = "sequence_parallel_size";

/// Degrees; 1 if the file does not state them.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Axes {
    pub pp: usize,
    pub cp: usize,
    pub tp: usize,
    pub ep: usize,
}

impl Axes {
    pub fn read(file: &File) -> Result<Axes, FrameworkError> {
        let note = |key: &str| file.count(&format!("{NOTES}.{key}"));
        let mut pp = note("pipeline_parallel_degree")?;
        for key in STAGES {
            pp = pp.or(file.count(key)?);
        }
        let cp = note("context_parallel_degree")?.or(file.count(SEQUENCE)?);
        let ep = note("expert_parallel_degree")?.or(moe::expert_parallel_degree(file)?);
        let degree = |degree: Option<usize>| degree.unwrap_or(1).max(1);
        Ok(Axes {
            pp: degree(pp),
            cp: degree(cp),
            tp: degree(file.count(TENSOR)?),
            ep: degree(ep),
        })
    }

    /// The degrees by which the world is divided before data parallelism.
    pub fn taken(&self) -> [usize; 3] {
        [self.pp, self.cp, self.tp]
    }
}
