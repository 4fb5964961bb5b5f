//! Suggestions for unknown keys.

use strsim::normalized_damerau_levenshtein;

use super::{Framework, FrameworkError};

/// The minimum similarity of a suggestion. A less similar key would confuse more than it helps.
const MIN_SIMILARITY: f64 = 0.5;

/// Returns the error for an unknown key, with the most similar known key as a suggestion.
pub(super) fn unknown<'a>(
    framework: Framework,
    key: &str,
    known: impl Iterator<Item = &'a str>,
) -> FrameworkError {
    FrameworkError::UnknownKey {
        framework,
        key: shortened(key),
        hint: suggestion(key, known)
            .map_or_else(String::new, |known| format!(": did you mean {known}?")),
    }
}

/// The known key that is most similar to an unknown one, if any is similar.
pub(super) fn suggestion<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let short = shortened(key);
    let nearest = known
        .map(|candidate| (candidate, normalized_damerau_levenshtein(&short, candidate)))
        .filter(|(_, similarity)| *similarity >= MIN_SIMILARITY)
        .max_by(|a, b| a.1.total_cmp(&b.1));
    nearest.map(|(known, _)| known)
}

/// The comparison costs the product of both lengths, and the key comes from an untrusted file.
fn shortened(key: &str) -> String {
    key.chars().take(80).collect()
}
