//! Placeholders such as `${local_rank}`, which torchrun replaces too.
//!
//! Unlike Python's `string.Template` there, `$$` stays: a shell in the arguments of a program means its own pid.

use std::ffi::{OsStr, OsString};

/// Replaces the local rank in an argument of a program.
pub(crate) fn substitute_local_rank(argument: &OsStr, local_rank: usize) -> OsString {
    match argument.to_str() {
        Some(text) => substitute(text, &[("local_rank", &local_rank.to_string())]).into(),
        None => argument.to_owned(),
    }
}

/// Replaces `$NAME` and `${NAME}` of these names by their values. Everything else stays.
pub(crate) fn substitute(text: &str, values: &[(&str, &str)]) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        rest = &rest[at..];
        let (replacement, length) = replacement(rest, values);
        result.push_str(replacement);
        rest = &rest[length..];
    }
    result.push_str(rest);
    result
}

/// What stands for the beginning of a text that begins with `$`, and how many of its bytes that beginning has.
fn replacement<'a>(text: &str, values: &[(&str, &'a str)]) -> (&'a str, usize) {
    let of_name = |(name, value): &(&str, &'a str)| {
        let plain = format!("${name}");
        let braced = format!("${{{name}}}");
        let ends_there = |rest: &str| !rest.starts_with(continues_name);
        if text.starts_with(&braced) {
            Some((*value, braced.len()))
        } else {
            let rest = text.strip_prefix(&plain)?;
            ends_there(rest).then_some((*value, plain.len()))
        }
    };
    values.iter().find_map(of_name).unwrap_or(("$", 1))
}

fn continues_name(next: char) -> bool {
    next == '_' || next.is_ascii_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_known_names_are_replaced() {
        let substituted = |text: &str| substitute_local_rank(OsStr::new(text), 3);
        assert_eq!(substituted("--gpu=${local_rank}"), "--gpu=3");
        assert_eq!(substituted("$local_rank:$local_rank."), "3:3.");
        assert_eq!(
            substituted("$local_ranks $$ $HOME ${x} $"),
            "$local_ranks $$ $HOME ${x} $"
        );
        assert_eq!(substituted("plain"), "plain");
        let values = [("role_name", "trainer"), ("rank", "5"), ("local_rank", "1")];
        assert_eq!(
            substitute("<${role_name} $rank/$local_rank>: ", &values),
            "<trainer 5/1>: "
        );
    }
}
