//! What the writer of an unknown key probably meant.

use strsim::normalized_damerau_levenshtein;

use super::{Framework, FrameworkError};

/// Below this likeness a suggestion confuses more than it helps.
const LIKENESS: f64 = 0.5;

/// The error of an unknown key, with the known one most like it.
pub(super) fn unknown<'a>(
    framework: Framework,
    key: &str,
    known: impl Iterator<Item = &'a str>,
) -> FrameworkError {
    // Comparing costs the product of both lengths, and a file may hold anything.
    let short: String = key.chars().take(80).collect();
    let nearest = known
        .map(|candidate| (candidate, normalized_damerau_levenshtein(&short, candidate)))
        .filter(|(_, likeness)| *likeness >= LIKENESS)
        .max_by(|a, b| a.1.total_cmp(&b.1));
    FrameworkError::UnknownKey {
        framework,
        key: short,
        hint: nearest.map_or_else(String::new, |(known, _)| format!(": did you mean {known}?")),
    }
}
