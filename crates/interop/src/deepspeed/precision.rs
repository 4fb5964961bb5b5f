//! Number types: `fp16`, `bf16`, `amp`, `communication_data_type` and `data_types`.

use serde_json::Value;

use super::super::{FrameworkError, Outcome};
use super::file::{File, invalid};

/// Whether layers compute in two bytes.
pub(super) fn is_narrow(file: &File) -> Result<bool, FrameworkError> {
    Ok(is_fp16(file)? || is_bf16(file)?)
}

/// Whether layers compute in float16, with loss scaling.
pub(super) fn is_fp16(file: &File) -> Result<bool, FrameworkError> {
    file.flag("fp16.enabled")
}

/// The section had the longer name first.
fn is_bf16(file: &File) -> Result<bool, FrameworkError> {
    Ok(file.flag("bf16.enabled")? || file.flag("bfloat16.enabled")?)
}

/// Bytes of a gradient before it is reduced: that of the type in which layers compute.
pub(super) fn gradient_bytes(file: &File) -> Result<usize, FrameworkError> {
    Ok(if is_narrow(file)? { 2 } else { 4 })
}

/// Rejects what DeepSpeed itself rejects.
pub(super) fn check(file: &File) -> Result<(), FrameworkError> {
    if is_fp16(file)? && is_bf16(file)? {
        return Err(super::FRAMEWORK.unsupported(
            "fp16.enabled with bf16.enabled",
            "layers compute in one type",
            "disable one of them",
        ));
    }
    Ok(())
}

pub(super) fn outcome(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    Ok(Some(match key {
        "fp16.enabled" if file.flag(key)? => compute("float16"),
        "bf16.enabled" | "bfloat16.enabled" if file.flag(key)? => compute("bfloat16"),
        "fp16.enabled" | "bf16.enabled" | "bfloat16.enabled" => Outcome::ignored("it is off"),
        "communication_data_type" => match value.as_str() {
            Some("fp32") => Outcome::set("training.mixed_precision_reduce", "float32"),
            Some("fp16") => Outcome::set("training.mixed_precision_reduce", "float16"),
            Some("bf16" | "bfp16") => Outcome::set("training.mixed_precision_reduce", "bfloat16"),
            _ => return Err(invalid(key, value, "\"fp32\", \"fp16\" or \"bf16\"")),
        },
        "data_types.grad_accum_dtype" => {
            Outcome::ignored("gradients accumulate in training.dtype, float32 by default")
        }
        _ => return without_counterpart(file, key, value),
    }))
}

fn compute(dtype: &str) -> Outcome {
    Outcome::set_all([
        ("training.dtype", "float32".to_owned()),
        ("training.mixed_precision_param", dtype.to_owned()),
    ])
}

fn without_counterpart(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    let Some((section, name)) = key.split_once('.') else {
        return Ok(None);
    };
    if !matches!(section, "fp16" | "bf16" | "bfloat16" | "amp") {
        return Ok(None);
    }
    let enabled = format!("{section}.enabled");
    if !file.flag(&enabled)? {
        return Ok(Some(Outcome::ignored(format!("{section} is not enabled"))));
    }
    let is_off = value == &Value::Bool(false);
    Ok(match (section, name) {
        ("amp", _) => Some(Outcome::rejected(
            "Apex casts operator by operator, and Trainyard by layer",
            "use \"bf16\": {\"enabled\": true} or fp16",
        )),
        ("fp16", "loss_scale") if value.as_f64() == Some(0.0) => {
            Some(Outcome::left("the loss scale is dynamic here too"))
        }
        ("fp16", "loss_scale") => Some(Outcome::rejected(
            "the loss scale is always dynamic",
            "use 0",
        )),
        ("fp16", "initial_scale_power") if value.as_f64() == Some(16.0) => {
            Some(Outcome::left("the loss scale starts at 2^16 here too"))
        }
        ("fp16", "initial_scale_power") => {
            Some(Outcome::ignored("the loss scale starts at 2^16 and adapts"))
        }
        ("fp16", "loss_scale_window") => Some(Outcome::ignored(
            "the loss scale doubles after 2000 steps without overflow",
        )),
        ("fp16", "hysteresis" | "consecutive_hysteresis") => Some(Outcome::ignored(
            "the loss scale is halved at every overflow",
        )),
        ("fp16", "min_loss_scale") => Some(Outcome::ignored(
            "the loss scale has no lower limit; value_guard ends a job whose values stay unusable",
        )),
        ("fp16", "auto_cast") => Some(Outcome::ignored("inputs are cast as layers need them")),
        (_, "immediate_grad_update" | "check_grad_overflow") => Some(Outcome::ignored(
            "it changes speed only; value_guard checks gradients",
        )),
        (
            _,
            "fp16_master_weights_and_grads"
            | "bf16_master_weights_and_grads"
            | "bf16_optimizer_states",
        ) if is_off => Some(Outcome::ignored("it is off")),
        (
            _,
            "fp16_master_weights_and_grads"
            | "bf16_master_weights_and_grads"
            | "bf16_optimizer_states",
        ) => Some(Outcome::rejected(
            "weights, gradients and states share one type",
            "remove it, or set --training.dtype bfloat16 for all of them",
        )),
        _ => None,
    })
}
