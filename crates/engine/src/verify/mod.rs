//! `trainyard verify`: the run on each rank, and the comparison of the results.

pub mod compare;
pub mod rank;
pub mod served;
