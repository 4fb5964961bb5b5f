//! The section `optimizer`.

use serde_json::Value;

use super::super::{FrameworkError, Outcome, Translation};
use super::file::{File, invalid};

const TYPE: &str = "optimizer.type";
const PARAMS: &str = "optimizer.params.";

/// The optimizers that both have: DeepSpeed's name, in lower case, and ours.
const NAMES: [(&str, &str); 6] = [
    // DeepSpeed's Adam decouples weight decay unless adam_w_mode is false.
    ("adam", "AdamW"),
    ("adamw", "AdamW"),
    ("lamb", "LAMB"),
    ("lion", "Lion"),
    ("muon", "Muon"),
    ("sgd", "SGD"),
];

/// DeepSpeed's default of a parameter that a file does not state.
struct Default {
    param: &'static str,
    value: &'static str,
    /// The keys of ours.
    settings: &'static [(&'static str, &'static str)],
}

/// The defaults of an Adam.
const ADAM_DEFAULTS: [Default; 4] = [
    Default {
        param: "lr",
        value: "0.001",
        settings: &[("optimizer.lr", "0.001")],
    },
    Default {
        param: "betas",
        value: "[0.9,0.999]",
        settings: &[("optimizer.beta1", "0.9"), ("optimizer.beta2", "0.999")],
    },
    Default {
        param: "eps",
        value: "1e-8",
        settings: &[("optimizer.eps", "1e-8")],
    },
    Default {
        param: "weight_decay",
        value: "0",
        settings: &[("optimizer.weight_decay", "0")],
    },
];

/// Our name of the optimizer.
fn name(file: &File) -> Option<&'static str> {
    let given = file.text(TYPE)?.to_ascii_lowercase();
    let known = NAMES.iter().find(|(known, _)| *known == given);
    known.map(|(_, name)| *name)
}

pub(super) fn outcome(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    if key == TYPE {
        return Ok(Some(match name(file) {
            Some(name) => Outcome::set("optimizer.name", name),
            None => Outcome::rejected(
                "Trainyard has no such optimizer",
                "use Adam, AdamW, Lamb, Lion, Muon or SGD, or register your own (`trainyard new`)",
            ),
        }));
    }
    let Some(param) = key.strip_prefix(PARAMS) else {
        return Ok(key
            .starts_with("optimizer.")
            .then(|| Outcome::ignored("it is about DeepSpeed's implementation")));
    };
    if name(file).is_none() && file.get(TYPE).is_some() {
        return Ok(Some(Outcome::left("it belongs to optimizer.type")));
    }
    let number = || {
        value
            .as_f64()
            .ok_or_else(|| invalid(key, value, "a number"))
    };
    let is_off = matches!(value, Value::Bool(false));
    Ok(Some(match param {
        "lr" if schedules_lr(file) => Outcome::left("scheduler.params.warmup_max_lr replaces it"),
        "lr" | "eps" | "weight_decay" | "momentum" => {
            number()?;
            Outcome::set(&format!("optimizer.{param}"), value)
        }
        "nesterov" => Outcome::set("optimizer.nesterov", file.flag(key)?),
        "betas" => betas(key, value)?,
        "adam_w_mode" if is_off && decays(file)? => Outcome::rejected(
            "weight decay is decoupled from the gradient (AdamW)",
            "use \"adam_w_mode\": true, or \"weight_decay\": 0",
        ),
        "bias_correction" if is_off => Outcome::rejected(
            "moments are always corrected for their bias",
            "use \"bias_correction\": true",
        ),
        "amsgrad" if !is_off => Outcome::rejected("AMSGrad is not implemented", "use false"),
        "dampening" if value.as_f64() != Some(0.0) => {
            Outcome::rejected("momentum has no dampening", "use 0")
        }
        "max_coeff" | "min_coeff" => {
            Outcome::rejected("LAMB's trust ratio has no limits", "remove it")
        }
        "adam_w_mode" | "bias_correction" | "amsgrad" | "dampening" => {
            Outcome::left("the same here")
        }
        "torch_adam" | "fused" | "foreach" | "capturable" | "use_triton" => {
            Outcome::ignored("it changes speed only; optimizer.implementation chooses kernels")
        }
        _ => return Ok(None),
    }))
}

fn betas(key: &str, value: &Value) -> Result<Outcome, FrameworkError> {
    let numbers: Option<Vec<f64>> = value
        .as_array()
        .and_then(|betas| betas.iter().map(Value::as_f64).collect());
    match numbers.as_deref() {
        Some([first, second]) => Ok(Outcome::set_all([
            ("optimizer.beta1", first.to_string()),
            ("optimizer.beta2", second.to_string()),
        ])),
        _ => Err(invalid(key, value, "a list of two numbers")),
    }
}

fn decays(file: &File) -> Result<bool, FrameworkError> {
    let decay = file.number("optimizer.params.weight_decay")?;
    Ok(decay.is_some_and(|decay| decay != 0.0))
}

/// A warm-up sets the learning rate of every step, whatever that of the optimizer is.
fn schedules_lr(file: &File) -> bool {
    let has_warmup = file
        .text("scheduler.type")
        .is_some_and(|name| matches!(name, "WarmupLR" | "WarmupDecayLR"));
    has_warmup && file.get("scheduler.params.warmup_max_lr").is_some()
}

/// What an optimizer without these keys uses: DeepSpeed's defaults, which are not ours.
pub(super) fn push_defaults(file: &File, translation: &mut Translation) {
    if name(file) != Some("AdamW") {
        return;
    }
    for default in ADAM_DEFAULTS {
        let Default {
            param,
            value,
            settings,
        } = default;
        let is_replaced = param == "lr" && schedules_lr(file);
        if file.has(&format!("{PARAMS}{param}")) || is_replaced {
            continue;
        }
        let settings = settings
            .iter()
            .map(|(key, value)| (*key, (*value).to_owned()));
        translation.push(
            format!("{PARAMS}{param}"),
            format!("{value} (DeepSpeed's default)"),
            Outcome::set_all(settings),
        );
    }
}
