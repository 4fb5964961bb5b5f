//! The section `scheduler`: the learning rate.

use serde_json::Value;

use super::super::{FrameworkError, Outcome, Translation};
use super::file::{File, invalid, whole};

const TYPE: &str = "scheduler.type";
const PARAMS: &str = "scheduler.params.";

/// DeepSpeed's default of `cos_min_ratio`.
const MIN_RATIO: f64 = 0.0001;

/// DeepSpeed's default of `warmup_num_steps`.
const WARMUP_STEPS: usize = 1000;

/// The decay of a schedule that Trainyard has.
fn decay(file: &File) -> Option<&'static str> {
    match file.text(TYPE)? {
        "WarmupLR" => Some("constant"),
        "WarmupDecayLR" => Some("linear"),
        "WarmupCosineLR" => Some("cosine"),
        _ => None,
    }
}

pub(super) fn outcome(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    if key == TYPE {
        return Ok(Some(match decay(file) {
            Some(decay) => Outcome::set("lr_scheduler.decay_type", decay),
            None => Outcome::rejected(
                "Trainyard has no such schedule",
                "use WarmupLR, WarmupDecayLR or WarmupCosineLR, or register your own (`trainyard new`)",
            ),
        }));
    }
    let Some(param) = key.strip_prefix(PARAMS) else {
        return Ok(None);
    };
    if decay(file).is_none() && file.get(TYPE).is_some() {
        return Ok(Some(Outcome::left("it belongs to scheduler.type")));
    }
    let number = || {
        value
            .as_f64()
            .ok_or_else(|| invalid(key, value, "a number"))
    };
    let count = || whole(value).ok_or_else(|| invalid(key, value, "a whole number"));
    Ok(Some(match param {
        "warmup_num_steps" => Outcome::set("lr_scheduler.warmup_steps", count()?),
        "warmup_max_lr" => {
            number()?;
            Outcome::set("optimizer.lr", value)
        }
        "warmup_min_lr" | "warmup_min_ratio" if number()? == 0.0 => {
            Outcome::left("warm-up starts at 0 here too")
        }
        "warmup_min_lr" | "warmup_min_ratio" => Outcome::rejected("warm-up starts at 0", "use 0"),
        "warmup_type" if value == "linear" => Outcome::left("warm-up is linear here too"),
        "warmup_type" => logarithmic(),
        "total_num_steps" => Outcome::set("training.steps", count()?)
            .with_note("the schedule ends with the last step"),
        "cos_min_ratio" => Outcome::set("lr_scheduler.min_lr_factor", number()?),
        "last_batch_iteration" => Outcome::ignored("a resumed job continues its schedule"),
        _ => return Ok(None),
    }))
}

fn logarithmic() -> Outcome {
    Outcome::rejected(
        "warm-up is linear",
        "use \"warmup_type\": \"linear\", which --ignore means too",
    )
}

/// What a schedule without these keys uses: DeepSpeed's defaults.
pub(super) fn push_defaults(file: &File, translation: &mut Translation) {
    let Some(decay) = decay(file) else {
        return;
    };
    let mut push = |param: &str, value: String, outcome: Outcome| {
        let key = format!("{PARAMS}{param}");
        if !file.has(&key) {
            translation.push(key, format!("{value} (DeepSpeed's default)"), outcome);
        }
    };
    push(
        "warmup_num_steps",
        WARMUP_STEPS.to_string(),
        Outcome::set("lr_scheduler.warmup_steps", WARMUP_STEPS),
    );
    push("warmup_type", "\"log\"".to_owned(), logarithmic());
    if decay == "cosine" {
        push(
            "cos_min_ratio",
            MIN_RATIO.to_string(),
            Outcome::set("lr_scheduler.min_lr_factor", MIN_RATIO),
        );
    }
}
