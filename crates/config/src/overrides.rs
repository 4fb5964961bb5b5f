//! Settings from the command line: `--training.steps 100`, `--training.steps=100`.
//!
//! Dashes and underscores in keys are equivalent. A value is parsed as the type of its key, so `--job.description 7` is a
//! string. A boolean key without a value is true.

use toml::Value;

use crate::custom_section::CUSTOM;
use crate::schema::{Kind, Schema};
use crate::suggest::hint_for_key;
use crate::{ConfigError, Location, Names};

/// Keys and values, in the order given.
pub fn parse(
    schema: &Schema,
    names: &Names,
    arguments: &[String],
) -> Result<Vec<(String, Value)>, ConfigError> {
    let mut settings = Vec::new();
    let mut rest = arguments;
    while let Some((argument, following)) = rest.split_first() {
        let (flag, attached) = split(argument)?;
        let (key, kind) = lookup(schema, flag)?;
        let (value, left) = match attached {
            Some(value) => (Some(value), following),
            None => take_value(kind, following),
        };
        settings.push((key.clone(), read(names, (&key, kind), argument, value)?));
        rest = left;
    }
    Ok(settings)
}

/// Splits `--key=value` into key and value, and `--key` into the key alone.
fn split(argument: &str) -> Result<(&str, Option<&str>), ConfigError> {
    let Some(body) = argument.strip_prefix("--") else {
        return Err(ConfigError::Override {
            argument: argument.to_owned(),
            reason: "overrides look like --training.steps 100 or --training.steps=100".into(),
        });
    };
    Ok(match body.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (body, None),
    })
}

fn lookup(schema: &Schema, flag: &str) -> Result<(String, Kind), ConfigError> {
    let custom = flag
        .strip_prefix(CUSTOM)
        .and_then(|flag| flag.strip_prefix('.'));
    if let Some((name, key)) = custom.and_then(|custom| custom.split_once('.')) {
        // The name is as it was registered.
        let key = format!("{CUSTOM}.{name}.{}", key.replace('-', "_"));
        return Ok((key, Kind::Any));
    }
    let key = flag.replace('-', "_");
    match schema.kind(&key) {
        Some(kind) => Ok((key, kind)),
        None => Err(ConfigError::UnknownKey {
            place: Location::CommandLine,
            hint: hint_for_key(schema, &key),
            key,
        }),
    }
}

/// The next argument, if it is a value.
fn take_value(kind: Kind, following: &[String]) -> (Option<&str>, &[String]) {
    match following.split_first() {
        Some((next, left)) if !next.starts_with("--") => (Some(next), left),
        _ if matches!(kind, Kind::Bool | Kind::Any) => (Some("true"), following),
        _ => (None, following),
    }
}

fn read(
    names: &Names,
    (key, kind): (&str, Kind),
    argument: &str,
    value: Option<&str>,
) -> Result<Value, ConfigError> {
    let Some(value) = value else {
        return Err(ConfigError::Override {
            argument: argument.to_owned(),
            reason: format!("{key} needs a value: {}", names.describe(key, kind, "")),
        });
    };
    let read = kind.read(value);
    let read = read.filter(|value| names.accept(key, kind, value));
    read.ok_or_else(|| ConfigError::Value {
        place: Location::CommandLine,
        key: key.to_owned(),
        expected: names.describe(key, kind, value),
        found: format!("{value:?}"),
    })
}

#[cfg(test)]
mod tests {
    use crate::{Config, GradientCompression};

    fn with(arguments: &[&str]) -> Result<Config, String> {
        let arguments: Vec<_> = arguments.iter().map(|a| a.to_string()).collect();
        Config::parse("[training]\nsteps = 9\n", &arguments).map_err(|e| e.to_string())
    }

    #[test]
    fn both_spellings_and_both_separators() {
        for arguments in [
            ["--training.local-batch-size", "3"].as_slice(),
            &["--training.local_batch_size", "3"],
            &["--training.local-batch-size=3"],
        ] {
            assert_eq!(with(arguments).unwrap().training.local_batch_size, 3);
        }
    }

    #[test]
    fn values_take_the_type_of_their_key() {
        let config = with(&[
            "--job.description=7",
            "--optimizer.lr",
            "1",
            "--metrics.enable_tensorboard",
            "--parallelism.overlap",
            "false",
            "--parallelism.data-parallel-replicate-degree",
            "-1",
            "--parallelism.gradient_compression=bf16",
            "--training.steps=1_000",
        ])
        .unwrap();
        assert_eq!(config.job.description, "7");
        assert_eq!(config.optimizer.lr, 1.0);
        assert!(config.metrics.enable_tensorboard && !config.parallelism.overlap);
        assert_eq!(config.parallelism.data_parallel_replicate_degree, -1);
        let compression = config.parallelism.gradient_compression;
        assert_eq!(compression, GradientCompression::Bf16);
        assert_eq!(config.training.steps, 1000);
    }

    #[test]
    fn the_last_override_wins() {
        let config = with(&["--training.steps", "1", "--training.steps", "2"]).unwrap();
        assert_eq!(config.training.steps, 2);
    }

    #[test]
    fn steps_on_the_command_line_replace_the_epochs_of_a_file() {
        let with = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
            Config::parse("[training]\nepochs = 3\n", &arguments).map(|config| config.training)
        };
        assert_eq!(with(&[]).unwrap().epochs, Some(3));
        let training = with(&["--training.steps", "7"]).unwrap();
        assert_eq!((training.epochs, training.steps), (None, 7));
    }

    #[test]
    fn invalid_arguments_are_rejected_with_a_reason() {
        assert_eq!(
            with(&["--training.step", "3"]).unwrap_err(),
            "command line: unknown key training.step: did you mean training.steps?"
        );
        assert_eq!(
            with(&["--training.steps", "many"]).unwrap_err(),
            "command line: training.steps expects a non-negative integer, not \"many\""
        );
        assert!(
            with(&["--training.steps"])
                .unwrap_err()
                .contains("needs a value")
        );
        assert!(
            with(&["training.steps", "3"])
                .unwrap_err()
                .contains("overrides look like")
        );
    }
}
