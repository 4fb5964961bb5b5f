//! Suggestions for misspelled names.

use strsim::normalized_damerau_levenshtein;

use crate::schema::Schema;

/// The minimum similarity of a suggestion.
const LIKENESS: f64 = 0.5;

/// The candidate most similar to `word`, if one is similar enough.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    candidates
        .map(|candidate| {
            let likeness = normalized_damerau_levenshtein(&word, &candidate.to_lowercase());
            (candidate, likeness)
        })
        .filter(|(_, likeness)| *likeness >= LIKENESS)
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(candidate, _)| candidate)
}

/// A hint about an unknown key: the same name in another section, the nearest key, or all keys.
pub fn hint_for_key(schema: &Schema, key: &str) -> String {
    let (section, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    if let Some(known) = key_named(schema, leaf).or_else(|| nearest(key, schema.keys())) {
        return format!("did you mean {known}?");
    }
    let siblings: Vec<_> = schema
        .keys()
        .filter_map(|known| known.split_once('.'))
        .filter(|(known, _)| *known == section)
        .map(|(_, name)| name)
        .collect();
    if siblings.is_empty() {
        hint_for_section(schema, section)
    } else {
        format!("[{section}] has the keys {}", siblings.join(", "))
    }
}

/// The key that an option without a section means, as in `--lr`: one of this name, or of the nearest one.
pub fn key_for_option(option: &str) -> Option<&'static str> {
    let schema = Schema::get();
    let name = option.trim_start_matches('-').split('=').next()?;
    let name = name.replace('-', "_");
    let nearest = || {
        nearest(&name, schema.keys().filter_map(name_of)).and_then(|name| key_named(schema, name))
    };
    key_named(schema, &name).or_else(nearest)
}

/// The first key of this name, in any section.
fn key_named<'a>(schema: &'a Schema, name: &str) -> Option<&'a str> {
    schema.keys().find(|key| name_of(key) == Some(name))
}

/// The name of a key without its section.
fn name_of(key: &str) -> Option<&str> {
    key.rsplit_once('.').map(|(_, name)| name)
}

/// A hint about an unknown section: the nearest one, or all.
pub fn hint_for_section(schema: &Schema, section: &str) -> String {
    match nearest(section, schema.sections()) {
        Some(known) => format!("did you mean [{known}]?"),
        None => {
            let all: Vec<_> = schema.sections().collect();
            format!("the sections are {}", all.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_key_gets_a_suggestion() {
        let hint = |key| hint_for_key(Schema::get(), key);
        assert_eq!(hint("training.step"), "did you mean training.steps?");
        assert_eq!(
            hint("training.batch_size"),
            "did you mean training.local_batch_size?"
        );
    }

    #[test]
    fn a_key_in_the_wrong_section_gets_a_suggestion() {
        let hint = hint_for_key(Schema::get(), "training.seed");
        assert_eq!(hint, "did you mean debug.seed?");
    }

    #[test]
    fn an_option_without_a_section_gets_its_key() {
        assert_eq!(key_for_option("--lr"), Some("optimizer.lr"));
        assert_eq!(key_for_option("--lr=3"), Some("optimizer.lr"));
        assert_eq!(key_for_option("--seq-len"), Some("training.seq_len"));
        assert_eq!(
            key_for_option("--batch-size"),
            Some("training.local_batch_size")
        );
        assert_eq!(key_for_option("--qqqqqqqqqqqqqqqqqqqq"), None);
    }

    #[test]
    fn nonsense_gets_the_list() {
        let hint = hint_for_key(Schema::get(), "debug.qqqqqqqqqqqqqqqqqqqq");
        assert_eq!(
            hint,
            "[debug] has the keys seed, deterministic, sample_log_folder, routing_skew, bad_sample, bad_rank, bad_step, \
             flip_bit, flip_bit_step, flip_bit_rank, guard_cost_block"
        );
        let hint = hint_for_section(Schema::get(), "zzzz");
        assert!(hint.starts_with("the sections are job, model,"), "{hint}");
    }
}
