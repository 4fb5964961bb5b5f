//! The keys of mixtures of experts, as tutorials give them: in a `moe` section, or as the arguments of DeepSpeed's
//! `MoE` layer at the top level.

use serde_json::Value;

use super::super::{FrameworkError, Outcome};
use super::file::{File, invalid, whole};

/// The sections that contain them; the empty one is the top level.
const SECTIONS: [&str; 4] = ["moe.", "mixture_of_experts.", "expert_parallel.", ""];

const DEGREE: [&str; 4] = [
    "ep_size",
    "ep_world_size",
    "expert_parallel_size",
    "moe_expert_parallel_size",
];

/// DeepSpeed's default of `min_capacity`.
const USUAL_MIN_CAPACITY: usize = 4;

/// The name of the key without its section.
fn field(key: &str) -> Option<&str> {
    let section = SECTIONS.iter().find(|&&section| key.starts_with(section))?;
    let name = &key[section.len()..];
    (!name.contains('.')).then_some(name)
}

/// Megatron-DeepSpeed gives a list with one number per group of layers.
fn single(value: &Value) -> &Value {
    match value {
        Value::Array(values) if values.len() == 1 => &values[0],
        value => value,
    }
}

pub(super) fn expert_parallel_degree(file: &File) -> Result<Option<usize>, FrameworkError> {
    for section in SECTIONS {
        if !section.is_empty()
            && file.get(&format!("{section}enabled")) == Some(&Value::Bool(false))
        {
            continue;
        }
        for name in DEGREE {
            let degree = file.count(&format!("{section}{name}"))?;
            if degree.is_some() {
                return Ok(degree);
            }
        }
    }
    Ok(None)
}

pub(super) fn outcome(
    file: &File,
    key: &str,
    value: &Value,
) -> Result<Option<Outcome>, FrameworkError> {
    let Some(name) = field(key) else {
        return Ok(None);
    };
    let is_section = name != key;
    let count = || whole(single(value)).ok_or_else(|| invalid(key, value, "a whole number"));
    let number = || {
        single(value)
            .as_f64()
            .ok_or_else(|| invalid(key, value, "a number"))
    };
    Ok(Some(match name {
        "enabled" | "enable" if is_section => Outcome::left("the other keys describe the experts"),
        "num_experts" | "num_local_experts" | "moe_experts" => {
            Outcome::set("model.moe.num_experts", count()?)
        }
        "top_k" | "topk" | "num_experts_per_tok" => per_token(count()?),
        "k" if is_section => per_token(count()?),
        "moe_intermediate_size" | "expert_intermediate_size" | "expert_hidden_size" => {
            Outcome::set("model.moe.moe_intermediate_size", count()?)
        }
        "capacity_factor" | "train_capacity_factor" | "moe_train_capacity_factor" => {
            capacity(file, key, number()?)?
        }
        "aux_loss_coef"
        | "aux_loss_weight"
        | "loss_coeff"
        | "moe_loss_coeff"
        | "router_aux_loss_coef" => Outcome::set("model.moe.router_aux_loss_coef", number()?),
        "z_loss_coef" | "router_z_loss_coef" => {
            Outcome::set("model.moe.router_z_loss_coef", number()?)
        }
        name if DEGREE.contains(&name) => degree(file, count()?),
        name => return Ok(without_counterpart(name, value)),
    }))
}

/// One expert per token is weighted by its score, as DeepSpeed's top-1 gate does: normalized, every weight would be 1.
fn per_token(number: usize) -> Outcome {
    let mut settings = vec![("model.moe.num_experts_per_tok", number.to_string())];
    if number == 1 {
        settings.push(("model.moe.norm_topk_prob", "false".to_owned()));
    }
    Outcome::set_all(settings)
}

fn capacity(file: &File, key: &str, factor: f64) -> Result<Outcome, FrameworkError> {
    let section = key.rsplit_once('.').map_or("", |(section, _)| section);
    let drops = match section {
        "" => "drop_tokens".to_owned(),
        section => format!("{section}.drop_tokens"),
    };
    if file.get(&drops).is_some() && !file.flag(&drops)? {
        return Ok(Outcome::left(
            "drop_tokens is false, so no token is dropped",
        ));
    }
    Ok(Outcome::set("model.moe.capacity_factor", factor).with_note(
        "the capacity is of each sequence; DeepSpeed's is of each micro-batch of a rank",
    ))
}

fn degree(file: &File, degree: usize) -> Outcome {
    let mut settings = vec![("parallelism.expert_parallel_degree", degree.to_string())];
    if !file.has("zero_optimization.stage") && degree > 1 {
        // Experts are placed on ranks of dp_shard; without ZeRO these shard nothing else.
        settings.push(("parallelism.zero_stage", "0".to_owned()));
        settings.push(("parallelism.data_parallel_replicate_degree", "1".to_owned()));
        settings.push(("parallelism.data_parallel_shard_degree", "-1".to_owned()));
    }
    Outcome::set_all(settings)
}

fn without_counterpart(name: &str, value: &Value) -> Option<Outcome> {
    let is_off = matches!(value, Value::Null | Value::Bool(false)) || value == "None";
    let off = || Outcome::ignored("it is off");
    Some(match name {
        "eval_capacity_factor" | "moe_eval_capacity_factor" => {
            Outcome::ignored("evaluation uses model.moe.capacity_factor too")
        }
        "moe_param_group" | "moe_param_groups" => {
            Outcome::ignored("Trainyard finds the parameters of experts itself")
        }
        "use_tutel" | "enable_expert_tensor_parallelism" if !is_off => Outcome::ignored(
            "it changes speed only; Trainyard has one dispatcher, and unsplit experts",
        ),
        "drop_tokens" if is_off => {
            Outcome::left("no token is dropped without model.moe.capacity_factor")
        }
        "drop_tokens" => Outcome::left("tokens beyond the capacity factor are dropped"),
        "min_capacity" if whole(single(value)).is_some_and(|n| n <= USUAL_MIN_CAPACITY) => {
            Outcome::ignored("it matters for sequences of a few tokens only")
        }
        "min_capacity" => Outcome::rejected(
            "the capacity of an expert follows from model.moe.capacity_factor alone",
            "use at most 4, DeepSpeed's default",
        ),
        "noisy_gate_policy" if !is_off => Outcome::rejected(
            "the router adds no noise",
            "remove it; model.moe.router_aux_loss_coef balances the load",
        ),
        "use_residual" if !is_off => Outcome::rejected(
            "a residual MLP beside the experts is not implemented",
            "remove it; the nearest is model.moe.n_shared_experts = 1",
        ),
        "use_rts" if !is_off => Outcome::rejected(
            "the first tokens of a sequence are kept, not random ones",
            "use false",
        ),
        "use_tutel"
        | "enable_expert_tensor_parallelism"
        | "noisy_gate_policy"
        | "use_residual"
        | "use_rts" => off(),
        _ => return None,
    })
}
