//! Separates config keys (`--training.steps 100`) from the options of a command.

use std::ffi::OsString;

/// The commands that take a config and its keys.
const COMMANDS: [&str; 9] = [
    "config",
    "train",
    "dry-run",
    "dry-run-allocator",
    "mesh",
    "verify",
    "plan",
    "bench",
    "bench-operators-rank",
];

/// Whether the command of these arguments takes config keys.
pub fn takes_keys(args: &[OsString]) -> bool {
    args.get(1)
        .is_some_and(|name| COMMANDS.iter().any(|c| name == c))
}

/// The arguments of the command, and the config overrides.
pub fn split_overrides(args: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Vec<String>) {
    let mut own: Vec<OsString> = Vec::new();
    let mut overrides = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some(text) if takes_keys(&own) && names_a_key(text) => {
                let has_value = text.contains('=');
                overrides.push(text.to_owned());
                let value = args.next_if(|next| !has_value && !starts_with_dashes(next));
                overrides.extend(value.map(|value| value.to_string_lossy().into_owned()));
            }
            _ => own.push(arg),
        }
    }
    (own, overrides)
}

/// Only keys of the config have a dot: `--section.key`.
fn names_a_key(arg: &str) -> bool {
    arg.strip_prefix("--")
        .and_then(|key| key.split('=').next())
        .is_some_and(|key| key.contains('.'))
}

fn starts_with_dashes(arg: &OsString) -> bool {
    arg.as_encoded_bytes().starts_with(b"--")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_line(line: &str) -> (String, String) {
        let words = line.split_whitespace().map(OsString::from);
        let (own, overrides) = split_overrides(words);
        let own: Vec<&str> = own.iter().map(|arg| arg.to_str().unwrap()).collect();
        (own.join(" "), overrides.join(" "))
    }

    #[test]
    fn keys_are_found_wherever_they_stand() {
        for line in [
            "trainyard dry-run c.toml --a.b 1 --world 8 --c.d=x --e.f -1 --json",
            "trainyard dry-run --a.b 1 c.toml --c.d=x --world 8 --e.f -1 --json",
        ] {
            let (own, overrides) = split_line(line);
            assert_eq!(own, "trainyard dry-run c.toml --world 8 --json");
            assert_eq!(overrides, "--a.b 1 --c.d=x --e.f -1");
        }
    }

    #[test]
    fn a_boolean_key_does_not_consume_the_next_option() {
        let (own, overrides) = split_line("trainyard verify c.toml --a.b --nproc 2");
        assert_eq!(
            (own.as_str(), overrides.as_str()),
            ("trainyard verify c.toml --nproc 2", "--a.b")
        );
    }

    #[test]
    fn values_with_dots_and_other_commands_are_left_alone() {
        for line in [
            "trainyard trace ./rank0.json --json",
            "trainyard run -- trainyard train c.toml --a.b 1",
            "trainyard verify ../c.toml --nproc=2 --path=a.b",
        ] {
            assert_eq!(split_line(line), (line.to_owned(), String::new()));
        }
    }
}
