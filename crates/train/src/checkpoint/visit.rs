//! A visit of a strategy's states whose visitor fails with errors of this crate.

use trainyard_parallel::ParallelError;

use crate::error::{Result, TrainError};

/// The error of the visitor, which the strategy only passes on as an interruption.
#[derive(Default)]
pub(super) struct Visit {
    failure: Option<TrainError>,
}

impl Visit {
    /// Ends the visit if `result` is an error.
    pub(super) fn go_on(&mut self, result: Result<()>) -> trainyard_parallel::Result<()> {
        result.map_err(|error| {
            self.failure = Some(error);
            ParallelError::Interrupted
        })
    }

    /// The outcome of the whole visit.
    pub(super) fn end(self, visited: trainyard_parallel::Result<()>) -> Result<()> {
        match self.failure {
            Some(error) => Err(error),
            None => Ok(visited?),
        }
    }
}
