//! Translates a file key by key to Trainyard's config.

use serde_json::Value;

use super::super::suggest::suggestion;
use super::super::{FrameworkError, Outcome, TranslateOptions, Translation};
use super::axes::Axes;
use super::batch::{GLOBAL, MICRO, STEPS, Sizes};
use super::file::{AUTO, File, whole};
use super::{FRAMEWORK, keys, moe, optimizer, precision, scheduler, zero};

pub(in super::super) fn translate(
    text: &str,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    translate_file(&File::parse(text)?, options)
}

/// The same for values that another format had.
pub(in super::super) fn translate_value(
    root: Value,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    translate_file(&File::new(root)?, options)
}

fn translate_file(file: &File, options: &TranslateOptions) -> Result<Translation, FrameworkError> {
    precision::check(file)?;
    let context = Context {
        file,
        axes: Axes::read(file)?,
        sizes: Sizes::read(file)?,
        world: options.world,
    };
    let mut translation = Translation::default();
    for (key, value) in file.leaves() {
        let outcome = context.outcome(&key, value)?;
        translation.push(key, plain(value), outcome);
    }
    optimizer::push_defaults(file, &mut translation);
    scheduler::push_defaults(file, &mut translation);
    Ok(translation)
}

struct Context<'a> {
    file: &'a File,
    axes: Axes,
    sizes: Sizes,
    world: Option<usize>,
}

impl Context<'_> {
    fn outcome(&self, key: &str, value: &Value) -> Result<Outcome, FrameworkError> {
        let file = self.file;
        if value == AUTO {
            return Ok(Outcome::left("Trainyard's own value applies"));
        }
        if value.is_null() {
            return Ok(Outcome::left("null sets nothing"));
        }
        if let Some(section) = self.disabled_section(key) {
            return Ok(Outcome::ignored(format!("{section}.enabled is false")));
        }
        if let Some(outcome) = self.batch(key)? {
            return Ok(outcome);
        }
        let outcome = match key.split('.').next().unwrap_or(key) {
            "zero_optimization" => zero::outcome(file, &self.axes, key, value)?,
            "optimizer" => optimizer::outcome(file, key, value)?,
            "scheduler" => scheduler::outcome(file, key, value)?,
            "fp16" | "bf16" | "bfloat16" | "amp" | "communication_data_type" | "data_types" => {
                precision::outcome(file, key, value)?
            }
            _ => match keys::outcome(file, key, value)? {
                Some(outcome) => Some(outcome),
                None => moe::outcome(file, key, value)?,
            },
        };
        Ok(outcome.unwrap_or_else(|| unknown(key)))
    }

    /// The section of a key that is switched off as a whole. Those of number types have reports of their own.
    fn disabled_section<'k>(&self, key: &'k str) -> Option<&'k str> {
        let (section, name) = key.split_once('.')?;
        let is_type = matches!(section, "fp16" | "bf16" | "bfloat16" | "tensorboard");
        let enabled = self.file.get(&format!("{section}.enabled"));
        let is_disabled = enabled == Some(&Value::Bool(false));
        (is_disabled && !(is_type && name == "enabled")).then_some(section)
    }

    fn batch(&self, key: &str) -> Result<Option<Outcome>, FrameworkError> {
        let sizes = &self.sizes;
        if !matches!(key, GLOBAL | MICRO | STEPS) {
            return Ok(None);
        }
        if sizes.is_open() {
            return Ok(Some(match sizes.steps {
                Some(1) => Outcome::left("Trainyard's own batch sizes apply"),
                _ => Outcome::rejected(
                    "Trainyard has no number of accumulation steps: it follows from the batch sizes",
                    format!(
                        "give {MICRO}, or pass --training.global_batch_size and --ignore {STEPS}"
                    ),
                ),
            }));
        }
        let ranks = match self.world {
            Some(world) => FRAMEWORK.left_of(Some(world), &self.axes.taken())?,
            // No launcher: the file may still state a consistent job for another number of ranks.
            None => sizes.ranks()?.unwrap_or(1),
        };
        let batch = sizes.on(ranks)?;
        let on_ranks = format!("on {ranks} data-parallel ranks");
        let global = || ("training.global_batch_size", batch.global.to_string());
        let local = || ("training.local_batch_size", batch.micro.to_string());
        Ok(Some(match (key, sizes.global, sizes.micro) {
            (GLOBAL, _, Some(_)) => Outcome::set_all([global()]),
            (GLOBAL, _, None) => Outcome::set_all([global(), local()]).with_note(on_ranks),
            (MICRO, Some(_), _) => Outcome::set_all([local()]),
            (MICRO, None, _) => Outcome::set_all([local(), global()]).with_note(on_ranks),
            _ => Outcome::left(format!(
                "it follows: {} = {} x {} x {ranks} data-parallel ranks",
                batch.global,
                batch.micro,
                sizes.steps.unwrap_or(1)
            )),
        }))
    }
}

/// The value as JSON, but `5e8` as a whole number.
fn plain(value: &Value) -> String {
    whole(value).map_or_else(|| value.to_string(), |number| number.to_string())
}

fn unknown(key: &str) -> Outcome {
    let known = keys::known();
    let hint = suggestion(key, known.iter().map(String::as_str));
    let remedy = match hint {
        Some(known) => format!("did you mean {known}?"),
        None => "remove it".to_owned(),
    };
    Outcome::rejected(
        "Trainyard does not know this key of DeepSpeed's, so it may change the result",
        remedy,
    )
}
