//! What a program on an accelerator was seen to reach.

use crate::{Constants, Software};

/// How a program runs and how far it stays behind data sheets, as fitted to runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// What it does.
    pub software: Software,
    /// How far it stays behind.
    pub constants: Constants,
    /// How far off its predictions are on average, on runs it was not fitted to.
    pub spread: f64,
    /// The runs it was fitted to.
    pub source: String,
}

impl Calibration {
    /// Before anything is measured.
    pub fn likely(software: Software) -> Calibration {
        Calibration {
            software,
            constants: Constants::likely(),
            spread: 0.25,
            source: "nothing measured".to_owned(),
        }
    }
}
